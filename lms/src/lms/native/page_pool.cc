#include "page_pool.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

namespace lms {
namespace {

// Each seam may cost a mapping, and a process has 65530 of them by default, for its threads and libraries too.
constexpr std::size_t kMostSeams = 16384;
constexpr std::size_t kUnbounded = std::numeric_limits<std::size_t>::max();
constexpr std::size_t kMostLooks = 1024;         // at mappings, to find one that is large enough
constexpr std::size_t kLeastReturned = 1 << 20;  // bytes at a block's end: they cost a mapping
constexpr std::size_t kMostAdopted = 32 << 20;   // idle bytes, if nothing else bounds them

void* reserve(std::size_t nbytes) {
    // Without access it counts against no limit on memory (RLIMIT_DATA, overcommitment) while pages move in.
    void* const run = mmap(nullptr, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return run == MAP_FAILED ? nullptr : run;
}

void give_back(void* start, std::size_t nbytes) {
    // A hole makes two mappings of one, which the system may refuse: then the pages go and the addresses stay taken.
    if (munmap(start, nbytes) != 0) madvise(start, nbytes, MADV_DONTNEED);
}

}  // namespace

PagePool::PagePool() : page_(static_cast<std::size_t>(sysconf(_SC_PAGESIZE))) {}

void* PagePool::allocate(std::size_t nbytes) {
    if (nbytes > std::numeric_limits<std::size_t>::max() - page_) return nullptr;
    nbytes = (nbytes + page_ - 1) / page_ * page_;
    const std::lock_guard<std::mutex> guard(mutex_);
    const Address block = take(nbytes);
    if (block == nullptr) return nullptr;
    usage_.used += nbytes;
    note_peak();
    return block;
}

bool PagePool::free(void* block, bool whole) {
    const std::lock_guard<std::mutex> guard(mutex_);
    const auto found = blocks_.find(static_cast<Address>(block));
    if (found == blocks_.end() || found->second.idle) return false;
    if (found->second.lent && !whole) {
        give_up(found);
        return true;
    }
    if (!found->second.lent) usage_.used -= found->second.nbytes;  // else the pager has counted its pages
    found->second.lent = false;
    make_idle(found);
    trim(keep_);
    return true;
}

std::size_t PagePool::lend(void* block, std::size_t most) {
    const std::lock_guard<std::mutex> guard(mutex_);
    const auto found = blocks_.find(static_cast<Address>(block));
    if (found == blocks_.end() || found->second.idle || found->second.lent) return 0;
    if (found->second.nbytes > most) return 0;
    found->second.lent = true;
    found->second.fresh = 0;
    usage_.used -= found->second.nbytes;
    usage_.paged += found->second.nbytes;
    return found->second.nbytes;
}

void PagePool::left(std::size_t nbytes) {
    const std::lock_guard<std::mutex> guard(mutex_);
    usage_.paged -= nbytes;
}

void* PagePool::take_pages(std::size_t nbytes, void* place) {
    const std::lock_guard<std::mutex> guard(mutex_);
    const auto [within, start] = find_one_mapping(nbytes);
    Address run = nullptr;
    if (start != nullptr) {
        auto block = blocks_.find(within);
        remove_idle(block);
        if (start > within) {
            const auto before = block;
            block = split(block, static_cast<std::size_t>(start - within));
            add_idle(before);
        }
        if (block->second.nbytes > nbytes) add_idle(split(block, nbytes));
        run = block->first;
        blocks_.erase(block);
        seams_.erase(run);
        seams_.insert(run + nbytes);
    } else {
        void* const fresh = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (fresh == MAP_FAILED) return nullptr;
        run = static_cast<Address>(fresh);
        usage_.fresh += nbytes;
    }
    const Address to = static_cast<Address>(place);
    seams_.insert({to, to + nbytes});
    usage_.paged += nbytes;
    trim(keep_);
    note_peak();  // after the trim: fresh pages take no memory before they are touched
    return run;
}

// The smallest idle block that has `nbytes` in one mapping, and the address of these; null if none is found.
std::pair<PagePool::Address, PagePool::Address> PagePool::find_one_mapping(std::size_t nbytes) const {
    std::size_t looks = 0;
    for (auto fit = idle_.lower_bound({nbytes, nullptr}); fit != idle_.end(); ++fit) {
        const auto [size, block] = *fit;
        for (Address start = block; start + nbytes <= block + size;) {
            const auto seam = seams_.upper_bound(start);
            if (seam == seams_.end() || *seam >= start + nbytes) return {block, start};
            if (++looks == kMostLooks) return {nullptr, nullptr};
            start = *seam;
        }
    }
    return {nullptr, nullptr};
}

bool PagePool::wants(std::size_t nbytes) const {
    const std::lock_guard<std::mutex> guard(mutex_);
    return keep_ != kUnbounded || usage_.idle + nbytes <= kMostAdopted;
}

void PagePool::adopt(void* pages, std::size_t nbytes) {
    const std::lock_guard<std::mutex> guard(mutex_);
    const Address start = static_cast<Address>(pages);
    usage_.paged -= nbytes;
    seams_.erase(seams_.lower_bound(start), seams_.lower_bound(start + nbytes));
    seams_.insert({start, start + nbytes});
    add_idle(blocks_.emplace(start, Block{nbytes, false}).first);
    trim(keep_);
}

void PagePool::keep(std::size_t nbytes) {
    const std::lock_guard<std::mutex> guard(mutex_);
    keep_ = nbytes;
    trim(keep_);
}

std::size_t PagePool::left_over() const {
    const std::lock_guard<std::mutex> guard(mutex_);
    return keep_ == kUnbounded || keep_ < usage_.used ? 0 : keep_ - usage_.used;
}

void PagePool::reset_peak() {
    const std::lock_guard<std::mutex> guard(mutex_);
    usage_.used_peak = usage_.used;
    usage_.peak = all();
}

PoolUsage PagePool::usage() const {
    const std::lock_guard<std::mutex> guard(mutex_);
    return usage_;
}

// The idle block that fits best, cut to size, or one made of several.
PagePool::Address PagePool::take(std::size_t nbytes) {
    const auto fit = idle_.lower_bound({nbytes, nullptr});
    if (fit == idle_.end()) return stitch(nbytes);
    const auto block = blocks_.find(fit->second);
    remove_idle(block);
    if (block->second.nbytes > nbytes) add_idle(split(block, nbytes));
    return block->first;
}

// A new run of addresses: first over the pages of idle blocks, which are all smaller, then over fresh ones.
PagePool::Address PagePool::stitch(std::size_t nbytes) {
    void* run = reserve(nbytes);
    if (run == nullptr) {  // a limit on addresses (RLIMIT_AS) counts those of idle blocks as well
        trim(0);
        run = reserve(nbytes);
    }
    if (run == nullptr) return nullptr;
    const Address start = static_cast<Address>(run);
    seams_.erase(seams_.lower_bound(start), seams_.lower_bound(start + nbytes));  // of what lay there in former times
    seams_.insert(start + nbytes);  // what lies behind it may have become one mapping with it, and will not stay so
    std::size_t done = 0;
    while (done < nbytes && usage_.idle > 0) {
        if (seams_.size() > kMostSeams) {  // too much patchwork: begin anew
            trim(0);
            break;
        }
        const std::size_t left = nbytes - done;
        auto best = idle_.lower_bound({left, nullptr});
        if (best == idle_.end()) --best;  // the largest: the fewest moves
        const auto block = blocks_.find(best->second);
        remove_idle(block);
        if (block->second.nbytes > left) add_idle(split(block, left));
        const std::size_t part = block->second.nbytes;
        const bool moved = move(block->first, start + done, part);
        blocks_.erase(block);
        done += part;
        if (!moved) return abandon(start, nbytes, done);
    }
    usage_.stitched += done > 0;
    if (done < nbytes) {
        seams_.insert(start + done);
        if (mprotect(start + done, nbytes - done, PROT_READ | PROT_WRITE) != 0) return abandon(start, nbytes, done);
        usage_.fresh += nbytes - done;
    }
    blocks_.emplace(start, Block{nbytes, false, nbytes - done});
    return start;
}

// Give a run up for which the system has no pages, and those that moved into it.
PagePool::Address PagePool::abandon(Address start, std::size_t nbytes, std::size_t moved) {
    give_back(start, nbytes);
    usage_.returned += moved;
    return nullptr;
}

// Move the pages at `from` to `to`, mapping by mapping. Where the system refuses (too many mappings, or one that a
// library split by madvise or mlock), those pages are returned to it and fresh ones taken, which costs time and nothing
// else. False when there are none.
bool PagePool::move(Address from, Address to, std::size_t nbytes) {
    const Address end = from + nbytes;
    seams_.insert(end);
    for (Address piece = from; piece < end;) {
        const Address next = std::min(*seams_.upper_bound(piece), end);
        const auto size = static_cast<std::size_t>(next - piece);
        const Address target = to + (piece - from);
        // Asked first whether it is one mapping (nothing moves): a move that fails for that reason has unmapped its
        // target already, and another thread might get these addresses. Linux 6.17 and later say yes, and move several.
        const bool whole = mremap(piece, size, size, 0) != MAP_FAILED;
        if (!whole || mremap(piece, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, target) == MAP_FAILED) {
            give_back(piece, size);
            if (mprotect(target, size, PROT_READ | PROT_WRITE) != 0) {
                if (next < end) give_back(next, static_cast<std::size_t>(end - next));
                return false;
            }
            usage_.returned += size;
            usage_.fresh += size;
        }
        seams_.insert(target);
        seams_.erase(piece);
        piece = next;
    }
    return true;
}

// Make a freed block idle. Idle pages count as memory, so fresh pages that were not touched go back. A library's
// scratch is often much larger than what is used of it.
void PagePool::make_idle(Blocks::iterator block) {
    const std::size_t fresh = std::exchange(block->second.fresh, 0);
    std::vector<unsigned char> pages(fresh / page_);
    const Address start = block->first + block->second.nbytes - fresh;
    if (fresh > 0 && mincore(start, fresh, pages.data()) == 0) {
        const auto is_touched = [](unsigned char page) { return (page & 1) != 0; };
        const auto end = std::find_if(pages.rbegin(), pages.rend(), is_touched).base();  // most is used from the start
        const auto touched = static_cast<std::size_t>(std::count_if(pages.begin(), end, is_touched));
        auto kept = static_cast<std::size_t>(end - pages.begin());
        if (2 * touched <= kept) kept = 0;
        const std::size_t more = fresh - kept * page_;
        if (more == block->second.nbytes) return give_up(block);
        if (more >= kLeastReturned || kept == 0) give_up(split(block, block->second.nbytes - more));
    }
    add_idle(block);
}

// Make the block idle, as one with its idle neighbours.
void PagePool::add_idle(Blocks::iterator block) {
    usage_.idle += block->second.nbytes;
    const auto next = std::next(block);
    if (next != blocks_.end() && next->second.idle && block->first + block->second.nbytes == next->first) {
        idle_.erase({next->second.nbytes, next->first});
        block->second.nbytes += next->second.nbytes;
        blocks_.erase(next);
    }
    if (block != blocks_.begin()) {
        const auto previous = std::prev(block);
        if (previous->second.idle && previous->first + previous->second.nbytes == block->first) {
            idle_.erase({previous->second.nbytes, previous->first});
            previous->second.nbytes += block->second.nbytes;
            blocks_.erase(block);
            block = previous;
        }
    }
    block->second.idle = true;
    idle_.emplace(block->second.nbytes, block->first);
}

void PagePool::remove_idle(Blocks::iterator block) {
    idle_.erase({block->second.nbytes, block->first});
    block->second.idle = false;
    usage_.idle -= block->second.nbytes;
}

// Cut the block to `nbytes`; the rest is a block of its own, in use until its maker says otherwise.
PagePool::Blocks::iterator PagePool::split(Blocks::iterator block, std::size_t nbytes) {
    const auto rest = blocks_.emplace(block->first + nbytes, Block{block->second.nbytes - nbytes, false}).first;
    block->second.nbytes = nbytes;
    return rest;
}

// Return idle pages until all are at most `most`, those of the smallest blocks first: large ones are the easiest to
// reuse.
void PagePool::trim(std::size_t most) {
    while (usage_.idle > 0 && all() > most) {
        const std::size_t excess = (all() - most + page_ - 1) / page_ * page_;
        const auto block = blocks_.find(idle_.begin()->second);
        remove_idle(block);
        if (block->second.nbytes > excess) add_idle(split(block, excess));
        give_up(block);
    }
}

// Return a block's pages and addresses to the system.
void PagePool::give_up(Blocks::iterator block) {
    const Address end = block->first + block->second.nbytes;
    give_back(block->first, block->second.nbytes);
    if (!block->second.lent) usage_.returned += block->second.nbytes;  // else some of its pages may be away
    seams_.erase(seams_.lower_bound(block->first), seams_.lower_bound(end));
    seams_.insert(end);
    blocks_.erase(block);
}

void PagePool::note_peak() {
    usage_.used_peak = std::max(usage_.used_peak, usage_.used);
    usage_.peak = std::max(usage_.peak, all());
}

}  // namespace lms
