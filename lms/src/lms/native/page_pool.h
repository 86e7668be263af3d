// A pool of pages for a process's large blocks of memory: what is freed is handed out again instead of returned.
//
// An allocator that returns freed memory to the system pays for each page again when the next block touches it (a fault
// and a page of zeros). One that keeps freed blocks pays with memory: a block's hole serves only blocks that fit into
// it. This pool keeps the pages and not the holes. When no idle block is large enough, pages of several idle blocks are
// moved by mremap behind one new run of addresses, without being copied. So the pool never holds more pages than were
// in use at once, and after the first step of a training it faults no more, except in scratch that is hardly touched.
//
// Stitching blocks from the pages of others is the idea of GMLake (Guo et al., ASPLOS 2024), there for a GPU's memory.

#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <mutex>
#include <set>
#include <utility>

namespace lms {

// Everything in bytes, except the count at the end.
struct PoolUsage {
    std::size_t used = 0;        // in blocks that were handed out, less those that were lent
    std::size_t used_peak = 0;   // the most of `used` since `reset_peak`
    std::size_t idle = 0;        // freed and kept
    std::size_t peak = 0;        // the most of `used`, `idle` and `paged` together since `reset_peak`
    std::uint64_t fresh = 0;     // taken from the system, over the pool's life
    std::uint64_t returned = 0;  // given back to the system
    std::uint64_t stitched = 0;  // blocks for which pages of others were moved
    std::size_t paged = 0;       // of lent blocks, in memory
};

// Blocks of whole pages, page-aligned. Safe to use from several threads.
class PagePool {
  public:
    PagePool();

    PagePool(const PagePool&) = delete;
    PagePool& operator=(const PagePool&) = delete;

    // A block of at least `nbytes` (more than zero) with undefined contents; null when the system has no more.
    void* allocate(std::size_t nbytes);

    // Take a block back, to hand its pages out again. False, and nothing done, for memory that is not the pool's. The
    // pages of a block that was lent are handed out again if they are all there, which `whole` says.
    bool free(void* block, bool whole = false);

    // Lend a block in use to a pager, which takes its pages away and brings them back until the block is freed. The
    // bytes of the block; zero, and nothing done, for memory that is not the pool's and for more than `most` bytes.
    std::size_t lend(void* block, std::size_t most);

    // So many bytes of lent blocks are in memory no more.
    void left(std::size_t nbytes);

    // Pages for `nbytes` that come back to `place` in a lent block: one mapping, which the caller moves there. They
    // count as there. Null when the system has no more.
    void* take_pages(std::size_t nbytes, void* place);

    // Whether pages that leave are of use here. Without a bound on what is kept, few are: the others would stay for
    // ever.
    bool wants(std::size_t nbytes) const;

    // Take over pages that left a lent block, as a writable mapping of their own. They are handed out like freed ones.
    void adopt(void* pages, std::size_t nbytes);

    // Keep idle pages only while all pages together are at most `nbytes`; return what is more, now and from now on.
    void keep(std::size_t nbytes);

    // Bytes that blocks in use leave of what `keep` allows, for lent blocks. Zero without a bound.
    std::size_t left_over() const;

    // Let both peaks begin anew.
    void reset_peak();

    PoolUsage usage() const;

    // Around a fork: no other thread holds the lock in the moment of it, so the child's pool is whole.
    void lock() { mutex_.lock(); }
    void unlock() { mutex_.unlock(); }

  private:
    using Address = char*;

    struct Block {
        std::size_t nbytes;
        bool idle;
        std::size_t fresh = 0;  // bytes at its end that came from the system with it
        bool lent = false;
    };
    using Blocks = std::map<Address, Block>;

    Address take(std::size_t nbytes);
    std::pair<Address, Address> find_one_mapping(std::size_t nbytes) const;
    Address stitch(std::size_t nbytes);
    Address abandon(Address start, std::size_t nbytes, std::size_t moved);
    bool move(Address from, Address to, std::size_t nbytes);
    void make_idle(Blocks::iterator block);
    void add_idle(Blocks::iterator block);
    void remove_idle(Blocks::iterator block);
    Blocks::iterator split(Blocks::iterator block, std::size_t nbytes);
    void trim(std::size_t most);
    std::size_t all() const { return usage_.used + usage_.idle + usage_.paged; }
    void note_peak();
    void give_up(Blocks::iterator block);

    mutable std::mutex mutex_;
    Blocks blocks_;                                   // all, by address; they do not overlap
    std::set<std::pair<std::size_t, Address>> idle_;  // the idle ones, by size
    std::set<Address> seams_;                         // starts of mappings: mremap moves one at a time
    std::size_t keep_ = std::numeric_limits<std::size_t>::max();
    PoolUsage usage_;
    std::size_t page_;
};

}  // namespace lms
