// Blocks of a PagePool whose pages go out to a file and come back, at the same addresses.
//
// A tensor's address stays: its views, autograd's graph and a library's pointers remain valid. What touches a block
// that is out waits until it is back, whichever thread it is. So training is right whatever is foreseen. Foresight
// makes it fast: blocks come back before their use in the order in which the last step used them, and the one that is
// needed last leaves first (Belady, "A study of replacement algorithms for a virtual-storage computer", 1966).
//
// The faults are SIGSEGV's. A system call does not fault: it returns EFAULT for memory that is out, unless `let_read`
// has mapped the file in its place.

#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "page_pool.h"
#include "piece.h"

namespace lms {

struct PagerUsage {
    std::uint64_t tracked = 0;   // bytes that may leave
    std::uint64_t resident = 0;  // bytes of these that are in memory
    std::uint64_t out = 0;       // bytes written, over the pager's life
    std::uint64_t back = 0;      // bytes read
    std::uint64_t waited = 0;    // nanoseconds that threads waited for memory that was out
    std::uint64_t failed = 0;    // errno of the last write that failed since the last call of `usage`; 0 if none did
};

class Pager {
  public:
    static constexpr std::size_t kPiece = 8 << 20;  // bytes that move at once

    explicit Pager(PagePool& pool);

    // Let blocks leave from now on.
    void start();

    // Nothing leaves any more. What is away comes back as it is touched.
    void stop();

    // The first of so many new numbers of pieces.
    std::uint32_t number(std::uint32_t count);

    // Let the pages of a block of the pool's leave, in pieces of kPiece bytes that are numbered from `first`. Their
    // place in `file` begins at `offset` and has `room` bytes. Contents that are `transient` are not worth keeping
    // behind their last use of a step: they will be freed. Waits until the memory is within its bound again. False if
    // no block in use begins at `address`, if it is larger than the place, or if the last block with these numbers
    // lives on elsewhere.
    bool track(std::uint32_t first, char* address, int file, std::uint64_t offset, std::size_t room, bool transient);

    // The block is freed. What is clean becomes writable. True if all its pages are in memory: the pool may reuse them.
    bool forget(char* address);

    // No more blocks will be in this file. It is closed once none is left in it.
    void release(int file);

    // Another handler of SIGSEGV was installed: ours goes before it again.
    void take_faults();
    // Another handler will be installed, or removed: until then it is as if ours were not there.
    void leave_faults();

    // Keep at most `nbytes` of what is tracked in memory; more, if it `fills`, while the pool has room that no block
    // uses.
    void keep(std::size_t nbytes, bool fills);

    // Until a call with false: system calls may read what is out, such as a write to another file. They read it from
    // our file, and the pages do not count as resident. Calls nest. If the disk fails meanwhile, who reads gets SIGBUS.
    void let_read(bool begins);

    // The pool's bound has changed.
    void wake();

    // The pool is about to hand out a block of `nbytes`: let pieces leave until it has room for the block.
    void yield(std::size_t nbytes);

    // The order of uses in a step: `pieces[i]` is used at position `positions[i]`, which ascend from 0.
    void expect(const std::uint32_t* pieces, const std::uint32_t* positions, std::size_t count);

    // The step is at this position of that order.
    void reach(std::uint32_t position);

    // With `anew` a failed write is told once.
    PagerUsage usage(bool anew);

    // A thread faulted at this address, to write or perhaps to write: true if it may try again, false if the address is
    // nothing of ours.
    bool fault(char* address, bool writes);

    // Around a fork. The child's pager moves nothing.
    void before_fork() { mutex_.lock(); }
    void after_fork() { mutex_.unlock(); }
    void in_child();

  private:
    using State = Piece::State;
    using Lock = std::unique_lock<std::mutex>;

    bool has_blocks(int file) const;
    void read_ahead();
    void write_behind();
    void bring(Lock& lock, Piece& piece, std::uint32_t use);
    bool evict(Lock& lock, Piece& piece);
    void make_room(Lock& lock, std::size_t nbytes, std::size_t handed = 0);
    std::size_t room(std::size_t handed) const;
    Piece* next_back(std::uint32_t* distance);
    Piece* next_out(std::uint32_t than, bool reads_ahead);
    std::uint32_t next_use(const Piece& piece) const;
    std::uint32_t last_use(const Piece& piece) const;
    std::uint32_t distance(const Piece& piece) const;

    PagePool& pool_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Piece> pieces_;                  // by number
    std::map<char*, std::uint32_t> addresses_;  // of those that are not empty
    std::vector<int> released_;                 // files with blocks that may still be used
    std::vector<std::thread> threads_;
    bool running_ = false;
    std::size_t keep_ = ~std::size_t{0};
    bool fills_ = false;
    int readers_ = 0;         // calls of `let_read` that have begun and not ended
    bool short_ = false;      // more is in memory than there is room for, and `write_behind` knows
    std::size_t coming_ = 0;  // bytes that `read_ahead` would like to have room for
    std::uint32_t position_ = 0, length_ = 0;
    std::uint64_t clock_ = 0;
    std::size_t recent_;  // so many pieces that came last stay: one operation may use them all
    PagerUsage usage_;
};

}  // namespace lms
