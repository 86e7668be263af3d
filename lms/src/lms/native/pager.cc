#include "pager.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <iterator>
#include <limits>
#include <new>
#include <utility>

#include "faults.h"

namespace lms {
namespace {

constexpr std::uint32_t kNever = std::numeric_limits<std::uint32_t>::max();
constexpr std::size_t kSpare = 2 * Pager::kPiece;  // bytes that stay free for blocks that will be handed out
constexpr std::size_t kAhead = 4;                  // pieces that may be on their way back: enough to keep a disk busy
constexpr std::chrono::milliseconds kDrop(10);     // how long pages that system calls read from the file may stay

}  // namespace

Pager::Pager(PagePool& pool) : pool_(pool), recent_(std::max(8U, 2 * std::thread::hardware_concurrency())) {}

void Pager::start() {
    const Lock lock(mutex_);
    lms::take_faults(this);
    usage_.failed = 0;
    if (running_) return;
    running_ = true;
    threads_.emplace_back([this] { read_ahead(); });
    threads_.emplace_back([this] { write_behind(); });
}

void Pager::stop() {
    {
        const Lock lock(mutex_);
        running_ = false;
        keep_ = ~std::size_t{0};
        fills_ = false;
        changed_.notify_all();
    }
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
}

std::uint32_t Pager::number(std::uint32_t count) {
    const Lock lock(mutex_);
    pieces_.resize(pieces_.size() + count);
    return static_cast<std::uint32_t>(pieces_.size()) - count;
}

bool Pager::track(std::uint32_t first, char* address, int file, std::uint64_t offset, std::size_t room,
                  bool transient) {
    Lock lock(mutex_);
    if (pieces_[first].state != State::kEmpty) return pieces_[first].address == address;
    for (std::size_t index = 0; index * kPiece < room; ++index) {
        if (pieces_[first + index].state != State::kEmpty) return false;  // the last tensor's, which is being freed
    }
    const std::size_t nbytes = pool_.lend(address, room);
    if (nbytes == 0) return false;
    const std::size_t count = (nbytes + kPiece - 1) / kPiece;
    for (std::size_t index = 0; index < count; ++index) {
        Piece& piece = pieces_[first + index];
        const std::size_t start = index * kPiece;
        piece.address = address + start;
        piece.nbytes = std::min(kPiece, nbytes - start);
        piece.offset = offset + start;
        piece.file = file;
        piece.state = State::kDirty;
        piece.begins = index == 0;
        piece.transient = transient;
        piece.came_for = piece.written_for = kNever;
        piece.touched = ++clock_;
        addresses_.emplace(piece.address, static_cast<std::uint32_t>(first + index));
    }
    usage_.tracked += nbytes;
    usage_.resident += nbytes;
    changed_.notify_all();
    make_room(lock, 0);
    return true;
}

bool Pager::forget(char* address) {
    Lock lock(mutex_);
    auto found = addresses_.find(address);
    if (found == addresses_.end() || !pieces_[found->second].begins) return false;
    char* end = address;
    bool whole = true;
    while (found != addresses_.end() && found->first == end) {
        Piece& piece = pieces_[found->second];
        if (piece.begins != (end == address)) break;  // the next block
        changed_.wait(lock, [&piece] { return piece.state != State::kLeaving && piece.state != State::kComing; });
        end += piece.nbytes;
        usage_.tracked -= piece.nbytes;
        if (piece.state == State::kClean || piece.state == State::kDirty) {
            piece.state = piece.allow(PROT_READ | PROT_WRITE) ? State::kDirty : State::kClean;
        }
        whole = whole && piece.state == State::kDirty;
        if (piece.state != State::kAway && piece.state != State::kLost) {
            usage_.resident -= piece.nbytes;
            pool_.left(piece.nbytes);
        }
        piece.state = State::kEmpty;
        found = addresses_.erase(found);
    }
    changed_.notify_all();
    const auto last = std::partition(released_.begin(), released_.end(), [this](int file) { return has_blocks(file); });
    std::for_each(last, released_.end(), close);
    released_.erase(last, released_.end());
    return whole;
}

void Pager::release(int file) {
    const Lock lock(mutex_);
    has_blocks(file) ? released_.push_back(file) : static_cast<void>(close(file));
}

bool Pager::has_blocks(int file) const {
    return std::any_of(pieces_.begin(), pieces_.end(),
                       [file](const Piece& piece) { return piece.file == file && piece.state != State::kEmpty; });
}

void Pager::take_faults() {
    const Lock lock(mutex_);
    lms::take_faults(this);
}

void Pager::leave_faults() {
    const Lock lock(mutex_);
    lms::leave_faults();
}

void Pager::keep(std::size_t nbytes, bool fills) {
    const Lock lock(mutex_);
    keep_ = nbytes;
    fills_ = fills;
    changed_.notify_all();
}

void Pager::let_read(bool begins) {
    Lock lock(mutex_);
    if (!begins && readers_ == 0) return;  // the parent of this process began
    if (begins ? readers_++ == 0 : --readers_ == 0) {
        for (const Piece& piece : pieces_) {
            if (piece.state == State::kAway) piece.unmap(readers_ > 0);
        }
        changed_.notify_all();
    }
    if (!begins) return;
    // What was on its way before has no access until it has come or left.
    for (std::size_t index = 0; index < pieces_.size(); ++index) {
        const Piece& piece = pieces_[index];
        changed_.wait(lock, [&piece] { return piece.state != State::kComing && piece.lifted == nullptr; });
    }
}

void Pager::wake() {
    const Lock lock(mutex_);
    changed_.notify_all();
}

void Pager::yield(std::size_t nbytes) {
    Lock lock(mutex_);
    if (!fills_ || usage_.resident <= room(nbytes + kSpare)) return;
    if (!short_) changed_.notify_all();
    short_ = true;
    make_room(lock, 0, nbytes);
}

void Pager::expect(const std::uint32_t* pieces, const std::uint32_t* positions, std::size_t count) {
    const Lock lock(mutex_);
    for (Piece& piece : pieces_) {
        piece.positions.clear();
        piece.came_for = piece.written_for = kNever;
    }
    length_ = 0;
    for (std::size_t index = 0; index < count; ++index) {
        pieces_[pieces[index]].positions.push_back(positions[index]);
        length_ = positions[index] + 1;
    }
    position_ = 0;
    changed_.notify_all();
}

void Pager::reach(std::uint32_t position) {
    const Lock lock(mutex_);
    if (running_) lms::take_faults(this);
    position_ = position;
    // If all is in memory and may stay, the threads have nothing to do. They look at all pieces as they wake.
    if (usage_.resident != usage_.tracked || usage_.resident > room(kSpare)) changed_.notify_all();
}

PagerUsage Pager::usage(bool anew) {
    const Lock lock(mutex_);
    const PagerUsage now = usage_;
    if (anew) usage_.failed = 0;
    return now;
}

bool Pager::fault(char* address, bool writes) {
    Lock lock(mutex_);
    auto found = addresses_.upper_bound(address);
    if (found == addresses_.begin()) return false;
    Piece& piece = pieces_[(--found)->second];
    if (address >= piece.address + piece.nbytes) return false;
    if (piece.state == State::kClean || piece.state == State::kDirty) {
        if (piece.state == State::kClean && !writes) return true;  // it came meanwhile
        if (!piece.allow(PROT_READ | PROT_WRITE)) die("mprotect", piece.nbytes, errno);
        if (piece.state == State::kClean) piece.written_for = piece.came_for;
        piece.state = State::kDirty;
        return true;
    }
    if (piece.state == State::kLost) {
        std::fprintf(stderr,
                     "lms: error: a forked process uses memory that its parent has swapped out: use it in "
                     "the process that trains, or start the other one without fork\n");
        return false;
    }
    const auto began = std::chrono::steady_clock::now();
    changed_.wait(lock, [&piece] { return piece.state != State::kLeaving; });
    if (piece.state == State::kAway) make_room(lock, piece.nbytes);
    if (piece.state == State::kAway) bring(lock, piece, last_use(piece));  // else it came meanwhile
    changed_.wait(lock, [&piece] { return piece.state != State::kComing; });
    usage_.waited += static_cast<std::uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - began).count());
    return true;
}

void Pager::in_child() {
    running_ = fills_ = false;
    // The threads stayed in the parent, and so did what is away: the parent goes on writing to the file.
    static_cast<void>(new std::vector<std::thread>(std::move(threads_)));
    threads_.clear();
    new (&changed_) std::condition_variable;  // the parent's threads wait for the other one
    for (Piece& piece : pieces_) {
        piece.file = -1;
        if (piece.state == State::kLeaving) {
            if (piece.lifted != nullptr) piece.lay_back();
            piece.state = State::kDirty;
        }
        if (piece.state == State::kComing) {
            usage_.resident -= piece.nbytes;
            pool_.left(piece.nbytes);
        }
        if (piece.state == State::kComing || piece.state == State::kAway) {
            piece.allow(PROT_NONE);  // a save may have made it readable
            piece.state = State::kLost;
        }
    }
    readers_ = 0;
    mutex_.unlock();
}

// Read the pages elsewhere and move them into place, so that no thread sees them before they are whole.
void Pager::bring(Lock& lock, Piece& piece, std::uint32_t use) {
    piece.state = State::kComing;
    const std::size_t nbytes = piece.nbytes;
    usage_.resident += nbytes;
    piece.came_for = use;
    // If it was written to after the same use of an earlier step, it need not fault for that.
    bool writable = use == piece.written_for && use != kNever;
    void* const pages = pool_.take_pages(nbytes, piece.address);
    if (pages == nullptr) die("no memory", nbytes, ENOMEM);
    lock.unlock();
    if (!piece.fill(pages, writable)) {
        // A library split the mapping, by madvise or mlock, and the system moves only one at once.
        munmap(pages, nbytes);
        void* const fresh = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (fresh == MAP_FAILED || !piece.fill(fresh, writable)) die("mremap", nbytes, errno);
    }
    lock.lock();
    piece.state = writable ? State::kDirty : State::kClean;
    piece.touched = ++clock_;
    usage_.back += nbytes;
    changed_.notify_all();
}

// Write a piece's pages, unless the file has them, and give them back. False if the disk takes no more, or if the
// system refuses to change the access.
bool Pager::evict(Lock& lock, Piece& piece) {
    if (readers_ == 0 && pool_.wants(piece.nbytes)) piece.lift();
    if (piece.state == State::kDirty) {
        if (piece.lifted == nullptr && !piece.allow(PROT_READ)) return false;
        piece.state = State::kLeaving;
        lock.unlock();
        const int error = piece.write(piece.lifted != nullptr ? piece.lifted : piece.address);
        lock.lock();
        changed_.notify_all();
        if (error != 0) {
            usage_.failed = static_cast<std::uint64_t>(error);
            piece.state = State::kDirty;
            if (piece.lifted != nullptr) {
                piece.lay_back();
            } else {
                piece.allow(PROT_READ | PROT_WRITE);  // or else the next fault does it
            }
            return false;
        }
        usage_.out += piece.nbytes;
    }
    if (!piece.unmap(readers_ > 0) && piece.lifted == nullptr) {
        if (!piece.allow(PROT_READ)) die("mprotect", piece.nbytes, errno);
        piece.state = State::kClean;
        return false;
    }
    piece.state = State::kAway;
    usage_.resident -= piece.nbytes;
    if (piece.lifted != nullptr) {
        pool_.adopt(std::exchange(piece.lifted, nullptr), piece.nbytes);
    } else {
        pool_.left(piece.nbytes);
    }
    changed_.notify_all();
    return true;
}

// Bytes that may be in memory, if the pool hands out `handed` more.
std::size_t Pager::room(std::size_t handed) const {
    const std::size_t left = fills_ ? pool_.left_over() : 0;
    return std::max(keep_, left - std::min(left, handed));
}

// Let others leave until `nbytes` more may come and the pool may hand out `handed`, or until none can leave.
void Pager::make_room(Lock& lock, std::size_t nbytes, std::size_t handed) {
    while (usage_.resident + nbytes > room(handed)) {
        Piece* const victim = next_out(0, false);
        if (victim == nullptr || !evict(lock, *victim)) return;
    }
}

// The position of the next use, or of the first one in the next step. What is transient has none behind its last one.
std::uint32_t Pager::next_use(const Piece& piece) const {
    const auto& uses = piece.positions;
    const auto next = std::lower_bound(uses.begin(), uses.end(), position_);
    if (next != uses.end()) return *next;
    return uses.empty() || piece.transient ? kNever : uses.front();
}

// The position of the last use in this step so far, or of the next one if there was none.
std::uint32_t Pager::last_use(const Piece& piece) const {
    const auto& uses = piece.positions;
    const auto next = std::upper_bound(uses.begin(), uses.end(), position_);
    return next != uses.begin() ? *std::prev(next) : next_use(piece);
}

// Positions from here to the next use.
std::uint32_t Pager::distance(const Piece& piece) const {
    const std::uint32_t next = next_use(piece);
    return next == kNever || next >= position_ ? next - (next == kNever ? 0 : position_) : next + length_ - position_;
}

// The piece that is away and used first, if few are on their way back.
Piece* Pager::next_back(std::uint32_t* at) {
    if (length_ == 0) return nullptr;
    Piece* best = nullptr;
    std::uint32_t nearest = kNever;
    for (Piece& piece : pieces_) {
        if (piece.state != State::kAway) continue;
        const std::uint32_t distance = this->distance(piece);
        if (distance < nearest) nearest = distance, best = &piece;
    }
    *at = nearest;
    if (best == nullptr) return nullptr;
    // Read ahead no further than a disk needs: what waits here unused has made others leave for it.
    std::size_t waiting = 0;
    for (const Piece& piece : pieces_) {
        if (piece.state == State::kEmpty || piece.state == State::kAway || piece.state == State::kLost) continue;
        const std::uint32_t distance = this->distance(piece);
        if (distance > 0 && distance < nearest) waiting += piece.nbytes;
    }
    return waiting <= std::max(kAhead * kPiece, keep_ / 4) ? best : nullptr;
}

// The piece in memory that is used last, if that is later than `than` positions from here. Reading ahead does not evict
// what will soon be freed.
Piece* Pager::next_out(std::uint32_t than, bool reads_ahead) {
    Piece* best = nullptr;
    std::uint32_t farthest = 0;
    for (Piece& piece : pieces_) {
        if ((piece.state != State::kDirty && piece.state != State::kClean) || piece.file < 0) {
            continue;
        }
        if (piece.touched + recent_ > clock_) continue;
        const std::uint32_t distance = this->distance(piece);
        if (distance <= than || (reads_ahead && piece.transient && distance == kNever)) continue;
        if (best == nullptr || distance > farthest || (distance == farthest && piece.touched < best->touched)) {
            farthest = distance, best = &piece;
        }
    }
    return best;
}

void Pager::read_ahead() {
    Lock lock(mutex_);
    while (running_) {
        std::uint32_t at = 0;
        Piece* const piece = next_back(&at);
        if (piece != nullptr && usage_.resident + piece->nbytes <= room(kSpare)) {
            bring(lock, *piece, next_use(*piece));
            continue;
        }
        const std::size_t wanted = piece != nullptr && next_out(at, true) != nullptr ? 2 * kPiece : 0;
        if (wanted != coming_) {
            coming_ = wanted;
            changed_.notify_all();
        }
        changed_.wait(lock);
    }
}

void Pager::write_behind() {
    Lock lock(mutex_);
    while (running_) {
        Piece* victim = nullptr;
        const std::size_t room = this->room(kSpare);
        short_ = usage_.resident > room;
        if (short_) {
            victim = next_out(0, false);
        } else if (usage_.resident + coming_ > room) {
            std::uint32_t at = 0;
            if (next_back(&at) != nullptr) victim = next_out(at, true);
        }
        if (victim != nullptr && evict(lock, *victim)) continue;
        if (readers_ == 0) {
            changed_.wait(lock);
            continue;
        }
        changed_.wait_for(lock, kDrop);
        for (const Piece& piece : pieces_) {  // what was read stays in the system's cache, and is not ours
            if (piece.state == State::kAway) madvise(piece.address, piece.nbytes, MADV_DONTNEED);
        }
    }
}

}  // namespace lms
