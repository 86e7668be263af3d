// For tests of what becomes of memory that a transport does not give back.
#pragma once

#include <atomic>
#include <memory>

#include "transport/transport.h"

// A transport that takes nothing back until it is told to, as MPI does with what is half under way.
class Stubborn final : public ddl::Transport {
  public:
    struct Control {
        std::atomic<bool> holds{true};
        std::atomic<int> receives{0};  // posted
        std::atomic<int> sends{0};     // posted
        std::atomic<int> over{0};      // messages that came to their end
        const void* sent_from = nullptr;
    };

    Stubborn(std::unique_ptr<ddl::Transport> inner, Control& control) : inner_(std::move(inner)), control_(control) {}

    int rank() const override { return inner_->rank(); }
    int size() const override { return inner_->size(); }
    ddl::Ticket isend(int peer, ddl::Tag tag, const void* data, size_t bytes) override {
        control_.sent_from = data;
        ++control_.sends;
        return inner_->isend(peer, tag, data, bytes);
    }
    ddl::Ticket irecv(int peer, ddl::Tag tag, void* data, size_t capacity) override {
        ++control_.receives;
        return inner_->irecv(peer, tag, data, capacity);
    }
    ddl::Progress test(ddl::Ticket ticket, size_t* received) override {
        if (cancelled_ && !control_.holds) return inner_->cancel(ticket), ddl::Progress::done;
        const ddl::Progress progress = inner_->test(ticket, received);
        if (progress != ddl::Progress::pending) ++control_.over;
        return progress;
    }
    bool cancel(ddl::Ticket ticket) override {
        cancelled_ = true;
        return !control_.holds && inner_->cancel(ticket);
    }
    void notify(int peer, const void* data, size_t bytes) override { inner_->notify(peer, data, bytes); }
    bool next_notice(ddl::Notice* notice) override { return inner_->next_notice(notice); }
    bool is_dead(int rank) const override { return inner_->is_dead(rank); }

  private:
    const std::unique_ptr<ddl::Transport> inner_;
    Control& control_;
    bool cancelled_ = false;
};
