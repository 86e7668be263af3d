#include "mpi/transport_mpi.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/backoff.h"
#include "mpi/mpi_watch.h"

namespace ddl {
namespace {

constexpr int kNoticeTag = 0;
constexpr int kNoticeReceives = 16;       // preposted: a burst of notices finds its place without MPI's own buffers
constexpr unsigned kPollsForSends = 200;  // of poll_all(), after a send that MPI may still hold
constexpr unsigned kNoticePolls = 16;     // polls, with messages in flight, for each look for notices
constexpr double kGoodbyeSeconds = 0.25;  // for which close() gives notices time to leave

size_t count_parts(size_t bytes, size_t part) { return bytes == 0 ? 1 : (bytes - 1) / part + 1; }

// So that the next push_back()s up to `size` elements cannot fail.
template <typename T>
void make_room(std::vector<T>& elements, size_t size) {
    if (elements.capacity() < size) elements.reserve(2 * size);
}

// MPI may still use a request and its memory.
void leave_to_mpi(MPI_Request& request) {
    if (request != MPI_REQUEST_NULL) MPI_Request_free(&request);
}

}  // namespace

MpiTransport::MpiTransport(MPI_Comm data, MPI_Comm notices, MpiTransportOptions options)
    : data_(data), notices_(notices), options_(std::move(options)) {
    for (const MPI_Comm comm : {data_, notices_}) {
        check_mpi(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    }
    check_mpi(MPI_Comm_rank(data_, &rank_), "MPI_Comm_rank");
    check_mpi(MPI_Comm_size(data_, &size_), "MPI_Comm_size");
    void* value = nullptr;
    int found = 0;
    check_mpi(MPI_Comm_get_attr(data_, MPI_TAG_UB, &value, &found), "MPI_Comm_get_attr");
    constexpr int kNeeded = (1 << kTagBits) - 1;
    const int most = found ? *static_cast<int*>(value) : 32767;
    if (most < kNeeded) {
        throw Error(DDL_ERROR_UNSUPPORTED, "this MPI has tags up to " + std::to_string(most) + ", but " +
                                               std::to_string(kNeeded) +
                                               " are needed: choose another of its transports, or another MPI");
    }
    for (int i = 0; i < kNoticeReceives && size_ > 1; ++i) {
        NoticePart part;
        part.copy = std::make_unique<std::byte[]>(kNoticeBytes);
        await_notice(notice_parts_.add(std::move(part)));
    }
}

template <typename Post>
Ticket MpiTransport::post(bool is_send, size_t bytes, Post post_part) {
    // All memory first: what is posted is known.
    const size_t parts = count_parts(bytes, options_.part_bytes);
    parts_.make_room(parts);
    if (free_messages_.empty()) {
        make_room(messages_, messages_.size() + 1);
        make_room(free_messages_, messages_.size() + 1);
        messages_.emplace_back();
        free_messages_.push_back(messages_.size());
    }
    const Ticket ticket = free_messages_.back();
    free_messages_.pop_back();
    const MpiCall call;
    message(ticket) = {false, static_cast<int>(parts), 0};
    for (size_t i = 0; i < parts; ++i) {
        const size_t offset = i * options_.part_bytes;
        const size_t index = parts_.add({is_send, ticket});
        const size_t length = std::min(options_.part_bytes, bytes - offset);
        if (post_part(offset, static_cast<int>(length), &parts_.request(index)) != MPI_SUCCESS) {
            // Reported by test(), as a message that failed: nothing throws through the engine's thread.
            finish_part(index, {}, MPI_ERR_OTHER);
        }
    }
    return ticket;
}

Ticket MpiTransport::isend(int peer, Tag tag, const void* data, size_t bytes) {
    polls_for_sends_ = kPollsForSends;
    return post(true, bytes, [&](size_t offset, int length, MPI_Request* request) {
        return MPI_Isend(static_cast<const std::byte*>(data) + offset, length, MPI_BYTE, peer, static_cast<int>(tag),
                         data_, request);
    });
}

Ticket MpiTransport::irecv(int peer, Tag tag, void* data, size_t capacity) {
    return post(false, capacity, [&](size_t offset, int length, MPI_Request* request) {
        return MPI_Irecv(static_cast<std::byte*>(data) + offset, length, MPI_BYTE, peer, static_cast<int>(tag), data_,
                         request);
    });
}

void MpiTransport::poll() {
    if (closed_) return;
    const MpiCall call;
    parts_.test_some([this](size_t index, const MPI_Status& status, int error) { finish_part(index, status, error); });
    if (parts_.empty() || ++polls_ % kNoticePolls == 0) poll_notices();
}

void MpiTransport::poll_all() {
    if (polls_for_sends_ > 0) --polls_for_sends_;
    polls_ = kNoticePolls - 1;
    poll();
}

void MpiTransport::finish_part(size_t index, const MPI_Status& status, int error) {
    const Part part = parts_.part(index);
    int bytes = 0;
    if (!part.is_send && error == MPI_SUCCESS) MPI_Get_count(&status, MPI_BYTE, &bytes);
    Message& its = message(part.ticket);
    its.failed |= error != MPI_SUCCESS;
    its.received += static_cast<size_t>(bytes);
    --its.parts_left;
    parts_.remove(index);
}

void MpiTransport::poll_notices() {
    notice_parts_.test_some(
        [this](size_t index, const MPI_Status& status, int error) { finish_notice(index, status, error); });
    if (arriving_.empty()) return;
    // Testsome reports in the order of the array; messages are matched in the order in which receives were posted.
    std::sort(arriving_.begin(), arriving_.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    try {
        for (auto& [turn, notice] : arriving_) arrived_.push_back(std::move(notice));
    } catch (const std::bad_alloc&) {
        // Lost, as notices may be.
    }
    arriving_.clear();
}

void MpiTransport::finish_notice(size_t index, const MPI_Status& status, int error) {
    const NoticePart& part = notice_parts_.part(index);
    if (part.is_send) return notice_parts_.remove(index);
    int bytes = 0;
    if (error == MPI_SUCCESS) MPI_Get_count(&status, MPI_BYTE, &bytes);
    const std::byte* begin = part.copy.get();
    try {
        if (error == MPI_SUCCESS) {
            arriving_.emplace_back(part.turn, Notice{status.MPI_SOURCE, {begin, begin + bytes}});
        }
    } catch (const std::bad_alloc&) {
        // Lost, as notices may be.
    }
    await_notice(index);
}

void MpiTransport::await_notice(size_t index) {
    notice_parts_.part(index).turn = ++turns_;
    // Where it fails there is one receive less: notices are help, not data.
    if (MPI_Irecv(notice_parts_.part(index).copy.get(), static_cast<int>(kNoticeBytes), MPI_BYTE, MPI_ANY_SOURCE,
                  kNoticeTag, notices_, &notice_parts_.request(index)) != MPI_SUCCESS) {
        notice_parts_.remove(index);
    }
}

Progress MpiTransport::test(Ticket ticket, size_t* received) {
    Message& its = message(ticket);
    if (its.parts_left > 0) return Progress::pending;
    *received = its.received;
    free_messages_.push_back(ticket);
    return its.failed ? Progress::failed : Progress::done;
}

bool MpiTransport::cancel(Ticket ticket) {
    if (closed_) return false;
    const MpiCall call;
    for (size_t index = 0; index < parts_.end(); ++index) {
        if (!parts_.is_used(index) || parts_.part(index).ticket != ticket) continue;
        // MPI takes back no send, and a receive only if it has not begun to arrive. What it does not take back stays
        // in the array: a send, so that what the peer waits for still reaches it.
        if (!parts_.part(index).is_send) MPI_Cancel(&parts_.request(index));
        int finished = 0;
        MPI_Status status;
        const int error = MPI_Test(&parts_.request(index), &finished, &status);
        if (error == MPI_SUCCESS && !finished) continue;
        finish_part(index, status, error);
    }
    if (message(ticket).parts_left > 0) return false;
    free_messages_.push_back(ticket);
    return true;
}

void MpiTransport::notify(int peer, const void* data, size_t bytes) {
    if (closed_ || is_dead(peer)) return;
    NoticePart part;
    part.is_send = true;
    part.copy = std::make_unique<std::byte[]>(bytes);
    std::memcpy(part.copy.get(), data, bytes);
    const size_t index = notice_parts_.add(std::move(part));
    polls_for_sends_ = kPollsForSends;
    const MpiCall call;
    if (MPI_Isend(notice_parts_.part(index).copy.get(), static_cast<int>(bytes), MPI_BYTE, peer, kNoticeTag, notices_,
                  &notice_parts_.request(index)) != MPI_SUCCESS) {
        notice_parts_.remove(index);
    }
}

bool MpiTransport::next_notice(Notice* notice) {
    if (arrived_.empty()) return false;
    *notice = std::move(arrived_.front());
    arrived_.pop_front();
    return true;
}

void MpiTransport::close() {
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (std::exchange(closed_, true) || finalized) return;
    const MpiCall call;
    const double deadline = seconds_now() + kGoodbyeSeconds;
    for (size_t index = 0; index < notice_parts_.end(); ++index) {
        if (notice_parts_.is_used(index) && !notice_parts_.part(index).is_send)
            MPI_Cancel(&notice_parts_.request(index));
    }
    for (size_t index = 0; index < notice_parts_.end(); ++index) {
        if (!notice_parts_.is_used(index)) continue;
        int finished = 0;
        for (Backoff backoff(0, 1e-3);; backoff.pause()) {
            MPI_Request& request = notice_parts_.request(index);
            const bool failed = MPI_Test(&request, &finished, MPI_STATUS_IGNORE) != MPI_SUCCESS;
            if (failed || finished || seconds_now() > deadline) break;
        }
        if (finished) continue;
        leave_to_mpi(notice_parts_.request(index));
        static_cast<void>(notice_parts_.part(index).copy.release());
    }
    for (size_t index = 0; index < parts_.end(); ++index) {
        if (parts_.is_used(index)) leave_to_mpi(parts_.request(index));
    }
}

}  // namespace ddl
