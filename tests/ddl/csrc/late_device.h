// A device in this process's own memory whose copies are late: they happen when they are asked for the third time, so
// that what reads or writes too early gets wrong numbers.
#pragma once

#include <cstdlib>
#include <cstring>
#include <map>

#include "device/device.h"

class LateDevice final : public ddl::Device {
  public:
    ~LateDevice() override { clear(); }

    ddl::Ticket copy(void* to, const void* from, size_t bytes, bool) override {
        copies_[++last_] = {to, from, bytes, 0};
        ++count;
        return last_;
    }
    bool test(ddl::Ticket ticket) override {
        if (++copies_[ticket].asked < 3) return false;
        finish(ticket);
        return true;
    }
    void finish(ddl::Ticket ticket) noexcept override {
        const Copy& copy = copies_[ticket];
        std::memcpy(copy.to, copy.from, copy.bytes);
        copies_.erase(ticket);
    }

    size_t pending() const { return copies_.size(); }
    int count = 0;  // copies begun

  protected:
    std::byte* allocate(size_t bytes) override {
        auto* block = static_cast<std::byte*>(std::aligned_alloc(64, bytes));
        if (!block) throw std::bad_alloc();
        std::memset(block, 0xee, bytes);
        return block;
    }
    void release(std::byte* block) noexcept override { std::free(block); }

  private:
    struct Copy {
        void* to;
        const void* from;
        size_t bytes;
        int asked;
    };
    ddl::Ticket last_ = 0;
    std::map<ddl::Ticket, Copy> copies_;
};
