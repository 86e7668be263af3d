#include "measure/stream.h"

#include <algorithm>

namespace ddl {
namespace {

constexpr size_t kLeast = 16 << 10, kMost = 1 << 20;  // bytes of a message
constexpr int kReceives = 8;                          // posted ahead
constexpr size_t kPieces = 8;                         // messages in flight, at full speed

// The data that is sent. It is never written, so it takes no memory, and lives for ever, so that MPI may read it even
// after an error.
std::byte payload[kMost];

size_t message_bytes(size_t window) {
    size_t bytes = kLeast;
    while (bytes < kMost && 2 * bytes * kPieces <= window) bytes *= 2;
    return bytes;
}

}  // namespace

Stream::Stream(Bootstrap& bootstrap, int peer, Tag tag, const Box& box, double round_trip)
    : bootstrap_(bootstrap),
      peer_(peer),
      data_tag_(tag),
      acknowledgement_tag_(tag + 1),
      box_(box),
      on_time_(round_trip + box.queue_seconds),
      window_(2 * kLeast),
      arena_(new std::byte[kReceives * kMost]) {  // its pages are not touched if messages stay short
    for (int i = 0; i < kReceives; ++i) {
        std::byte* const place = arena_.get() + static_cast<size_t>(i) * kMost;
        receives_.emplace_back(bootstrap_.receive(peer_, data_tag_, place, kMost), place);
    }
}

Stream::~Stream() {
    bool free = true;
    for (const auto& [ticket, place] : receives_) free &= bootstrap_.cancel(ticket);
    if (!free) Bootstrap::keep(std::move(arena_));
}

double Stream::run() {
    start_ = seconds_now();
    bootstrap_.await(peer_, [this] { return poll(); });
    return rate();
}

// Makes progress; true when everything is over.
bool Stream::poll() {
    now_ = seconds_now();
    take_arrivals();
    take_acknowledgements();
    send_more();
    leaving_.erase(
        std::remove_if(leaving_.begin(), leaving_.end(), [&](Ticket one) { return bootstrap_.finished(one); }),
        leaving_.end());
    return said_end_ && heard_end_ && sent_.empty() && leaving_.empty();
}

void Stream::take_arrivals() {
    size_t bytes = 0;
    while (!heard_end_ && bootstrap_.finished(receives_.front().first, &bytes)) {
        std::byte* const place = receives_.front().second;
        receives_.pop_front();
        arrivals_.push_back({now_, bytes});
        if (bytes == 0) {
            heard_end_ = true;
            return;
        }
        leaving_.push_back(bootstrap_.send(peer_, acknowledgement_tag_, nullptr, 0));
        receives_.emplace_back(bootstrap_.receive(peer_, data_tag_, place, kMost), place);
    }
}

void Stream::take_acknowledgements() {
    while (!sent_.empty()) {
        if (acknowledgement_ == 0) acknowledgement_ = bootstrap_.receive(peer_, acknowledgement_tag_, nullptr, 0);
        if (!bootstrap_.finished(acknowledgement_)) return;
        acknowledgement_ = 0;
        const Sent first = sent_.front();
        sent_.pop_front();
        leaving_.push_back(first.ticket);
        under_way_ -= first.bytes;
        const double took = now_ - first.at;
        if (took < on_time_) {
            window_ = std::min(window_ + first.bytes, box_.most_bytes);  // doubles in each round trip
        } else if (took > 1.5 * on_time_) {
            window_ = std::max(window_ - first.bytes / 2, 2 * kLeast);
        }
    }
}

void Stream::send_more() {
    if (said_end_) return;
    if (now_ - start_ >= box_.warm_seconds + box_.count_seconds) {
        said_end_ = true;
        leaving_.push_back(bootstrap_.send(peer_, data_tag_, nullptr, 0));
        return;
    }
    for (const size_t bytes = message_bytes(window_); under_way_ + bytes <= window_;) {
        sent_.push_back({bootstrap_.send(peer_, data_tag_, payload, bytes), now_, bytes});
        under_way_ += bytes;
    }
}

// Counts whole messages, from the first arrival after the warm-up to the first after the end, over their time. If that
// covers at most half of the time, because little arrived or this rank did not get its core, counts everything. Its
// time is then at least that for which the other rank sends: all may have been there when this rank got its core. The
// last arrival is always the end message.
double Stream::rate() const {
    const double opens = start_ + box_.warm_seconds, closes = opens + box_.count_seconds;
    const auto since = [this](double moment) {
        size_t at = 0;
        while (at + 1 < arrivals_.size() && arrivals_[at].at < moment) ++at;
        return at;
    };
    const auto bytes_after = [this](size_t first, size_t last) {
        size_t bytes = 0;
        for (size_t at = first + 1; at <= last; ++at) bytes += arrivals_[at].bytes;
        return static_cast<double>(bytes);
    };
    const size_t first = since(opens), last = since(closes);
    const double seconds = arrivals_[last].at - arrivals_[first].at;
    const double bytes = bytes_after(first, last);
    if (bytes > 0 && seconds > box_.count_seconds / 2) return bytes / seconds;
    const double all = static_cast<double>(arrivals_[0].bytes) + bytes_after(0, arrivals_.size() - 1);
    // At least a byte, because callers divide by it and take logarithms.
    return std::max(all, 1.0) / std::max(arrivals_.back().at - start_, box_.warm_seconds + box_.count_seconds);
}

}  // namespace ddl
