// A piece of a block: pages at a fixed address, or their bytes in a file. It knows how they move, and Pager when.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lms {

struct Piece {
    enum class State { kEmpty, kDirty, kClean, kLeaving, kAway, kComing, kLost };

    char* address = nullptr;
    std::size_t nbytes = 0;
    std::uint64_t offset = 0;
    int file = -1;  // none: it stays
    State state = State::kEmpty;
    bool begins = false;  // a block begins with it
    bool transient = false;
    void* lifted = nullptr;                // where its pages are while it leaves, if that is not its address
    std::uint32_t came_for = 0;            // the use that it last came back for
    std::uint32_t written_for = 0;         // the last of these after which it was written to
    std::uint64_t touched = 0;             // when it last came or was made, by a counter
    std::vector<std::uint32_t> positions;  // of its uses

    // Set the access to the pages in their place. False if the system refuses: there are too many mappings, for
    // example.
    bool allow(int access) const;

    // Write `pages`, which hold the piece's bytes, to the file. An errno; 0 if they are written.
    int write(const void* pages) const;

    // Give back pages whose bytes are in the file. A fresh mapping over them takes all access at once. If it `reads`,
    // it maps the file, for system calls to read. Neighbours become one mapping. False if the system refuses.
    bool unmap(bool reads) const;

    // Revoke the access and move the pages to an address of their own, `lifted`. There they are writable, and the pool
    // hands them out again. That is faster than new pages, because the system clears those first. If the pages stay,
    // `lifted` stays null; the access may be revoked then.
    void lift();

    // Move lifted pages back.
    void lay_back();

    // Read the bytes into `pages` and move these to their place. They become `writable` if the system does not make
    // them read-only. False if it does not move them.
    bool fill(void* pages, bool& writable) const;
};

// What was swapped out cannot come back, or what is here cannot stay: say so and end the process.
[[noreturn]] void die(const char* what, std::size_t nbytes, int error);

}  // namespace lms
