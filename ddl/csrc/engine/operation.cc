#include "engine/operation.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "base/backoff.h"
#include "base/float_environment.h"

namespace ddl {
namespace {

bool fits_fast_path(const Schedule& schedule, const std::vector<int>& members, const Transport& transport) {
    if (schedule.chunks.size() != 1) return false;
    for (const Span round : schedule.rounds) {
        int outgoing = 0, incoming = 0;
        for (uint32_t i = round.begin; i < round.end; ++i) {
            const Step& step = schedule.steps[i];
            if (!step.is_message()) continue;
            if (!step.first || step.bytes > kInlineBytes) return false;
            const int peer = members[static_cast<size_t>(step.peer)];
            if (!transport.shows(peer, sizeof(PackedHeader) + step.bytes)) return false;
            ++(step.is_incoming() ? incoming : outgoing);
        }
        if (outgoing > 1 || incoming > 1) return false;
    }
    return true;
}

}  // namespace

Operation::Operation(std::shared_ptr<const Schedule> schedule, const void* input, void* output, const Header& header,
                     const Group& group, int rank, Tag first_tag, int window, Transport& transport, ScratchPool& pool,
                     Means means)
    : schedule_(std::move(schedule)),
      input_(static_cast<const std::byte*>(input)),
      output_(static_cast<std::byte*>(output)),
      header_(header),
      packed_(pack(header)),
      group_(group),
      rank_(rank),
      first_tag_(first_tag),
      window_(static_cast<size_t>(window_of(*schedule_, std::clamp(window, 1, kChunkSlots)))),
      transport_(transport),
      pool_(pool),
      means_(std::move(means)),
      fast_(is_light() && fits_fast_path(*schedule_, group.members, transport)),
      agreed_(group.members.size()) {
    runs_.reserve(std::min(window_, schedule_->chunks.size()));
    flights_.reserve(runs_.capacity());
    if (schedule_->work_bytes > 0) work_ = pool_.take(schedule_->work_bytes);
    if (schedule_->stages == 0) return;
    group_order_ = group_order(*schedule_, static_cast<int>(window_));
    means_.groups->enter(this);
}

void Operation::repeat(const void* input, void* output, const Header& header, Tag first_tag) noexcept {
    input_ = static_cast<const std::byte*>(input);
    output_ = static_cast<std::byte*>(output);
    header_ = header;
    packed_ = pack(header);
    first_tag_ = first_tag;
    agreed_.assign(agreed_.size(), false);
    next_chunk_ = 0;
    timing_ = {};
}

const std::byte* Operation::read(const Run& run, const Place& place) const {
    return place.buffer == Buffer::input ? input_ + place.offset : write(run, place);
}

std::byte* Operation::write(const Run& run, const Place& place) const {
    std::byte* const memory = place.buffer == Buffer::work      ? work_.data()
                              : place.buffer == Buffer::staging ? run.staging.get()
                                                                : output_;
    return memory + place.offset;
}

bool Operation::fail(Code code, std::string message) {
    if (status_.ok()) status_ = {code, std::move(message)};
    return true;
}

bool Operation::begin_after_device() {
    if (!is_held_back() || !means_.after->passed()) return false;
    means_.after.reset();
    return true;
}

bool Operation::poll(int room) {
    if (!status_.ok() || is_held_back()) return false;
    bool moved = start_chunks(std::min(static_cast<size_t>(std::max(room, 1)), window_));
    for (Run& run : runs_) {
        moved |= advance(run);
        if (!status_.ok()) return true;
    }
    bool ended = false;
    const auto is_done = [&](const Run& run) { return run.round == schedule_->chunks[run.chunk].end; };
    if (!rolled_) rolled_ = schedule_->stages > 0 && !runs_.empty() && runs_[0].chunk == 0 && is_done(runs_[0]);
    for (Run& run : runs_) {
        if (!is_done(run)) continue;
        flights_.push_back(std::move(run.flights));
        ended = true;
    }
    if (ended) runs_.erase(std::remove_if(runs_.begin(), runs_.end(), is_done), runs_.end());
    return moved || ended;
}

Operation::Run& Operation::begin_chunk() {
    runs_.emplace_back();
    Run& run = runs_.back();
    run.chunk = next_chunk_;
    run.round = schedule_->chunks[next_chunk_].begin;
    if (!flights_.empty()) {
        run.flights = std::move(flights_.back());
        run.flights.clear();
        flights_.pop_back();
    }
    ++next_chunk_;
    return run;
}

void Operation::run_fast(int looks) {
    Run& run = begin_chunk();
    for (const uint32_t end = schedule_->chunks[0].end; run.round < end; ++run.round) {
        const Span round = schedule_->rounds[run.round];
        const Step* incoming = nullptr;
        for (uint32_t i = round.begin; i < round.end; ++i) {
            const Step& step = schedule_->steps[i];
            if (step.kind == StepKind::send) post_send(run, step);  // keeps a copy if the pipe is full
            if (step.is_incoming()) incoming = &step;
        }
        if (incoming && !take_now(run, *incoming, looks)) {
            run.flights.emplace_back();
            run.flights.back().step = incoming;
            post_receive(run, run.flights.back());
        }
        if (!run.flights.empty()) return;
        finish_round(run);
    }
    flights_.push_back(std::move(run.flights));
    runs_.clear();
}

// Takes a message straight from the transport. False if it is not there, or if its header or length is wrong: the
// ordinary receive then takes it, and reports what is wrong.
bool Operation::take_now(const Run& run, const Step& step, int looks) {
    const int peer = world(step.peer);
    const std::byte* message = nullptr;
    size_t bytes = 0;
    while (!transport_.peek(peer, header_tag(), &message, &bytes)) {
        if (--looks <= 0) return false;
    }
    if (!message || bytes != sizeof packed_ + step.bytes) return false;
    if (std::memcmp(message, &packed_, sizeof packed_) != 0) return false;
    const std::byte* const payload = message + sizeof packed_;
    if (step.kind == StepKind::reduce) {
        const DefaultFloats floats;  // this is the user's thread
        reduce(run, step, payload);
    } else if (step.bytes > 0) {
        std::memcpy(write(run, step.to), payload, step.bytes);
    }
    transport_.drop(peer);
    return true;
}

bool Operation::start_chunks(size_t most) {
    bool started = false;
    const auto& chunks = schedule_->chunks;
    // A slot's tag is free again only when the chunk that had it before is complete, or messages would be confused.
    while (next_chunk_ < chunks.size() && runs_.size() < most &&
           (runs_.empty() || next_chunk_ - runs_.front().chunk < kChunkSlots)) {
        Run& run = begin_chunk();
        if (schedule_->staging_bytes > 0) run.staging = means_.device->take(schedule_->staging_bytes);
        post_round(run);
        started = true;
    }
    return started;
}

void Operation::post_round(Run& run) {
    const Span round = schedule_->rounds[run.round];
    run.flights.clear();
    run.flights.reserve(round.size() * 2);
    // Receives first: what arrives then finds its place.
    for (uint32_t i = round.begin; i < round.end; ++i) {
        const Step& step = schedule_->steps[i];
        if (!step.is_incoming()) continue;
        run.flights.emplace_back();
        run.flights.back().step = &step;
        post_receive(run, run.flights.back());
    }
    for (uint32_t i = round.begin; i < round.end; ++i) {
        const Step& step = schedule_->steps[i];
        if (step.kind == StepKind::send) post_send(run, step);
        if (!step.is_group() && !step.is_transfer()) continue;
        run.flights.emplace_back();
        run.flights.back().step = &step;
        run.flights.back().state = Flight::gated;
    }
}

void Operation::post_send(Run& run, const Step& step) {
    const int peer = world(step.peer);
    const bool inlined = step.first && step.bytes <= kInlineBytes;
    const size_t payload = inlined ? step.bytes : 0;
    if (step.first && !transport_.send_now(peer, header_tag(), &packed_, sizeof packed_,
                                           payload > 0 ? read(run, step.from) : nullptr, payload)) {
        run.flights.emplace_back();
        Flight& flight = run.flights.back();
        flight.scratch = pool_.take(sizeof packed_ + payload);
        std::memcpy(flight.scratch.data(), &packed_, sizeof packed_);
        if (payload > 0) std::memcpy(flight.scratch.data() + sizeof packed_, read(run, step.from), payload);
        flight.ticket = transport_.isend(peer, header_tag(), flight.scratch.data(), sizeof packed_ + payload);
    }
    if (!inlined) {
        run.flights.emplace_back();
        Flight& flight = run.flights.back();
        flight.step = &step;
        flight.ticket = transport_.isend(peer, tag(run), read(run, step.from), step.bytes);
    }
}

void Operation::post_receive(Run& run, Flight& flight) {
    const Step& step = *flight.step;
    if (step.first) {
        flight.state = Flight::awaits_header;
        flight.scratch = pool_.take(sizeof packed_ + kInlineBytes);
        flight.ticket =
            transport_.irecv(world(step.peer), header_tag(), flight.scratch.data(), sizeof packed_ + kInlineBytes);
    } else if (agreed_[static_cast<size_t>(step.peer)]) {
        post_payload(run, flight);
    } else {
        flight.state = Flight::gated;  // until another chunk has seen the peer's header
    }
}

void Operation::post_payload(Run& run, Flight& flight) {
    const Step& step = *flight.step;
    std::byte* target = nullptr;
    if (step.at_once) {
        const Task& task = schedule_->task;
        const Reduction reduction{write(run, step.to), read(run, step.from), task.type, task.op, step.incoming_first};
        flight.ticket = transport_.irecv_reduce(world(step.peer), tag(run), reduction, step.bytes);
        if (flight.ticket != 0) {
            flight.scratch.release();  // the header's
            flight.state = Flight::moving;
            return;
        }
    }
    if (step.kind == StepKind::reduce) {
        flight.scratch = pool_.take(step.bytes);
        flight.data = target = flight.scratch.data();
    } else {
        flight.scratch.release();  // the header's
        if (step.bytes > 0) target = write(run, step.to);
    }
    flight.state = Flight::moving;
    flight.ticket = transport_.irecv(world(step.peer), tag(run), target, step.bytes);
}

bool Operation::advance(Run& run) {
    bool moved = false;
    const uint32_t end = schedule_->chunks[run.chunk].end;
    while (run.round < end) {
        bool complete = true;
        for (Flight& flight : run.flights) {
            if (flight.state == Flight::done) continue;
            moved |= advance(run, flight);
            if (!status_.ok()) return true;
            complete = complete && flight.state == Flight::done;
        }
        if (!complete) return moved;
        moved = true;
        finish_round(run);
        run.flights.clear();
        if (++run.round < end) post_round(run);
    }
    return moved;
}

bool Operation::advance(Run& run, Flight& flight) {
    if (flight.step && flight.step->is_group()) return advance_group(run, flight);
    if (flight.step && flight.step->is_transfer()) return advance_transfer(run, flight);
    return advance_message(run, flight);
}

bool Operation::advance_group(Run& run, Flight& flight) {
    const Step& step = *flight.step;
    GroupComm* const comm = means_.groups->of(step.dimension);
    if (flight.state == Flight::gated) {
        const auto index = static_cast<uint32_t>(&step - schedule_->steps.data());
        if (!rolled_ || group_order_[next_group_] != index || !means_.groups->has_turn(this)) return false;
        if (!comm->ready()) return false;
        const Task& task = schedule_->task;
        flight.ticket = comm->start({step.kind == StepKind::allgather, read(run, step.from), write(run, step.to),
                                     elements_in(step.bytes, task.type), task.type, task.op});
        flight.state = Flight::moving;
        if (++next_group_ == group_order_.size()) means_.groups->leave(this);
        return true;
    }
    if (!comm->test(flight.ticket)) return false;
    flight.ticket = 0;
    flight.state = Flight::done;
    return true;
}

bool Operation::advance_transfer(Run& run, Flight& flight) {
    if (flight.state == Flight::gated) {
        const Step& step = *flight.step;
        flight.ticket = means_.device->copy(write(run, step.to), read(run, step.from), step.bytes,
                                            step.kind == StepKind::to_device);
        flight.state = Flight::moving;
        return true;
    }
    if (!means_.device->test(flight.ticket)) return false;
    flight.ticket = 0;
    flight.state = Flight::done;
    return true;
}

bool Operation::advance_message(Run& run, Flight& flight) {
    if (flight.state == Flight::gated) {
        if (!agreed_[static_cast<size_t>(flight.step->peer)]) return false;
        post_payload(run, flight);
    }
    size_t received = 0;
    const Progress progress = transport_.test(flight.ticket, &received);
    if (progress == Progress::pending) return false;
    flight.ticket = 0;
    if (progress == Progress::failed) {
        const std::string peer = flight.step ? group_.names[static_cast<size_t>(flight.step->peer)] : "a rank";
        return fail(DDL_ERROR_TRANSPORT, "a message between this rank and " + peer + " failed during " +
                                             describe(header_) + ": the transport dropped or truncated it");
    }
    if (flight.state == Flight::awaits_header) return take_header(run, flight, received);
    if (flight.step && flight.step->is_incoming() && received != flight.step->bytes) {
        return fail(DDL_ERROR_INTERNAL,
                    describe(header_) + ": a message from " + group_.names[static_cast<size_t>(flight.step->peer)] +
                        " has " + std::to_string(received) + " bytes, expected " + std::to_string(flight.step->bytes));
    }
    flight.state = Flight::done;
    return true;
}

bool Operation::take_header(Run& run, Flight& flight, size_t received) {
    const Step& step = *flight.step;
    const auto& names = group_.names;
    PackedHeader packed;
    if (received >= sizeof packed) std::memcpy(&packed, flight.scratch.data(), sizeof packed);
    if (std::memcmp(&packed, &packed_, sizeof packed) != 0) {
        const Header theirs = received >= sizeof packed ? unpack(packed, header_) : Header{};
        return fail(DDL_ERROR_MISMATCH, describe_mismatch(names[static_cast<size_t>(rank_)], header_,
                                                          names[static_cast<size_t>(step.peer)], theirs));
    }
    agreed_[static_cast<size_t>(step.peer)] = true;
    if (timing_.began != 0 && run.round == schedule_->chunks[0].begin) {  // what it sends later depends on other ranks
        timing_.heard = seconds_now();
        timing_.heard_from = step.peer;
    }
    const bool inlined = step.bytes <= kInlineBytes;
    const size_t expected = sizeof packed + (inlined ? step.bytes : 0);
    if (received != expected) {
        return fail(DDL_ERROR_INTERNAL, describe(header_) + ": the first message from " +
                                            names[static_cast<size_t>(step.peer)] + " has " + std::to_string(received) +
                                            " bytes, expected " + std::to_string(expected));
    }
    if (!inlined) {
        post_payload(run, flight);
        return true;
    }
    flight.data = flight.scratch.data() + sizeof packed;
    if (step.kind == StepKind::receive && step.bytes > 0) std::memcpy(write(run, step.to), flight.data, step.bytes);
    flight.state = Flight::done;
    return true;
}

void Operation::reduce(const Run& run, const Step& step, const std::byte* message) const {
    const Task& task = schedule_->task;
    const std::byte* const mine = read(run, step.from);
    combine(write(run, step.to), step.incoming_first ? message : mine, step.incoming_first ? mine : message,
            elements_in(step.bytes, task.type), task.type, task.op);
}

void Operation::finish_round(const Run& run) {
    const DefaultFloats floats;  // this may be the user's thread
    for (const Flight& flight : run.flights) {
        if (flight.step && flight.step->kind == StepKind::reduce && flight.data) reduce(run, *flight.step, flight.data);
    }
    const Span round = schedule_->rounds[run.round];
    for (uint32_t i = round.begin; i < round.end; ++i) {
        const Step& step = schedule_->steps[i];
        if (step.kind == StepKind::copy && read(run, step.from) != write(run, step.to)) {
            std::memcpy(write(run, step.to), read(run, step.from), step.bytes);
        } else if (step.kind == StepKind::divide) {
            const DataType type = schedule_->task.type;
            divide(write(run, step.to), elements_in(step.bytes, type), type, schedule_->size);
        }
    }
}

void Operation::cancel() noexcept {
    if (std::exchange(cancelled_, true)) return;
    for (Run& run : runs_) {
        for (Flight& flight : run.flights) {
            if (flight.ticket == 0) continue;
            bool over = true;
            if (flight.step && flight.step->is_group()) {
                means_.groups->of(flight.step->dimension)->abandon(flight.ticket);
            } else if (flight.step && flight.step->is_transfer()) {
                means_.device->finish(flight.ticket);
            } else {
                over = transport_.cancel(flight.ticket);
            }
            if (over) flight.ticket = 0;
        }
    }
    if (schedule_->stages > 0) means_.groups->leave(this);
}

void Operation::settle() noexcept {
    for (Run& run : runs_) {
        for (Flight& flight : run.flights) {
            size_t received = 0;
            if (flight.ticket != 0 && transport_.test(flight.ticket, &received) != Progress::pending) flight.ticket = 0;
        }
    }
}

bool Operation::is_written() const {
    const auto writes = [&](const Flight& flight) {
        if (flight.ticket == 0 || flight.state != Flight::moving || !flight.step) return false;
        const Step& step = *flight.step;
        const bool to_caller = step.kind == StepKind::receive && step.to.buffer == Buffer::output;
        return to_caller && !transport_.is_dead(world(step.peer));
    };
    return std::any_of(runs_.begin(), runs_.end(),
                       [&](const Run& run) { return std::any_of(run.flights.begin(), run.flights.end(), writes); });
}

bool Operation::settled() const {
    return std::all_of(runs_.begin(), runs_.end(), [](const Run& run) {
        return std::all_of(run.flights.begin(), run.flights.end(), [](const Flight& f) { return f.ticket == 0; });
    });
}

std::vector<int> Operation::awaited() const {
    std::set<int> ranks;
    for (const Run& run : runs_) {
        for (const Flight& flight : run.flights) {
            if (!flight.step || flight.state == Flight::done) continue;
            if (flight.step->is_incoming()) ranks.insert(flight.step->peer);
            if (flight.step->is_group() && flight.state == Flight::moving) {
                const auto& members = schedule_->groups[flight.step->dimension];
                ranks.insert(members.begin(), members.end());
            }
        }
    }
    ranks.erase(rank_);
    return {ranks.begin(), ranks.end()};
}

std::string Operation::own_wait() const {
    if (is_held_back()) return "its GPU, whose stream has not done what it was given before this call";
    const auto copies = [](const Flight& f) { return f.state == Flight::moving && f.step && f.step->is_transfer(); };
    const bool any = std::any_of(runs_.begin(), runs_.end(), [&](const Run& run) {
        return std::any_of(run.flights.begin(), run.flights.end(), copies);
    });
    return any && awaited().empty() ? "copies between its GPU's memory and the host's" : "";
}

}  // namespace ddl
