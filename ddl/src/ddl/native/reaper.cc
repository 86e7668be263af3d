#include "reaper.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace ddl_torch {
namespace {

using Nap = std::chrono::microseconds;
constexpr Nap kShortestNap{20};  // between two looks
constexpr Nap kLongestNap{1000};

// All threads of this process's reapers. Never destroyed: they may outlive whatever has a destructor.
struct Threads {
    const pid_t process = getpid();
    std::mutex mutex;  // guards the rest
    std::condition_variable ended;
    std::vector<std::weak_ptr<void>> queues;
    int running = 0;
    bool closed = false;
};

Threads& threads() {
    static auto* const made = new Threads;
    return *made;
}

// Whether it may: not where the process ends, and not in a fork's child. Throws std::system_error: it cannot.
template <typename Body>
bool start(Body body) {
    Threads& all = threads();
    const std::lock_guard lock(all.mutex);
    if (all.closed || all.process != getpid()) return false;
    std::thread([&all, body = std::move(body)]() mutable {
        {
            const Body mine = std::move(body);  // what it holds goes before the thread says that it has ended
            mine();
        }
        const std::lock_guard lock(all.mutex);
        --all.running;
        all.ended.notify_all();
    }).detach();
    ++all.running;
    return true;
}

}  // namespace

struct Reaper::Queue : std::enable_shared_from_this<Queue> {
    explicit Queue(bool its_any_order) : any_order(its_any_order) {}

    const bool any_order;

    void add(std::unique_ptr<Awaited> it) {
        const std::lock_guard lock(mutex);
        fresh.push_back(std::move(it));
        ++unsettled;
        changed.notify_all();
        need_thread();
    }

    void stop() {
        const std::lock_guard lock(mutex);
        stopping = true;
        changed.notify_all();
    }

  private:
    std::mutex turn;  // of the thread that waits; guards the next
    std::list<std::unique_ptr<Awaited>> waiting;

    std::mutex mutex;  // guards the rest
    std::condition_variable changed;
    std::list<std::unique_ptr<Awaited>> fresh;
    size_t unsettled = 0;
    int unoccupied = 0;  // threads that settle nothing
    bool stopping = false;

    // With the lock held.
    void need_thread() {
        if (unsettled == 0 || unoccupied > 0) return;
        if (start([queue = shared_from_this()] { queue->serve(); })) unoccupied = 1;
    }

    void serve() {
        for (;;) {
            std::unique_ptr<Awaited> over;
            {
                const std::lock_guard mine(turn);
                over = any_order ? next_that_ends() : next_in_order();
            }
            {
                const std::lock_guard lock(mutex);
                if (!over && unsettled > 0) continue;  // it came just now
                --unoccupied;
                if (!over) return;
                --unsettled;
                try {
                    need_thread();
                } catch (const std::system_error&) {
                    // No more threads can be started: the others wait until this one is done.
                }
            }
            over->settle();
            over.reset();
            const std::lock_guard lock(mutex);
            if (unoccupied > 1) return;  // enough, until the next that takes long
            ++unoccupied;
        }
    }

    // The first, once it is over; null: there is none, and stop() was called.
    std::unique_ptr<Awaited> next_in_order() {
        if (waiting.empty()) receive(std::nullopt);
        if (waiting.empty()) return nullptr;
        std::unique_ptr<Awaited> first = std::move(waiting.front());
        waiting.pop_front();
        first->wait();
        return first;
    }

    // The first that is over; null as above.
    std::unique_ptr<Awaited> next_that_ends() {
        for (Nap nap = kShortestNap;; nap = std::min(2 * nap, kLongestNap)) {
            const auto found = std::find_if(waiting.begin(), waiting.end(), [](auto& it) { return it->test(); });
            if (found != waiting.end()) {
                std::unique_ptr<Awaited> over = std::move(*found);
                waiting.erase(found);
                return over;
            }
            if (receive(waiting.empty() ? std::nullopt : std::optional(nap))) {
                nap = kShortestNap;
            } else if (waiting.empty()) {
                return nullptr;
            }
        }
    }

    // Waits for more, until stop() or for that long. Whether there is more.
    bool receive(std::optional<Nap> nap) {
        std::unique_lock lock(mutex);
        if (nap) {
            changed.wait_for(lock, *nap, [&] { return !fresh.empty(); });
        } else {
            changed.wait(lock, [&] { return stopping || !fresh.empty(); });
        }
        const bool more = !fresh.empty();
        waiting.splice(waiting.end(), fresh);
        return more;
    }
};

Reaper::Reaper(bool any_order) : queue_(std::make_shared<Queue>(any_order)) {
    Threads& all = threads();
    const std::lock_guard lock(all.mutex);
    all.queues.erase(
        std::remove_if(all.queues.begin(), all.queues.end(), [](const auto& queue) { return queue.expired(); }),
        all.queues.end());
    all.queues.push_back(queue_);
}

void Reaper::add(std::unique_ptr<Awaited> it) { queue_->add(std::move(it)); }

void Reaper::stop() { queue_->stop(); }

void Reaper::end_threads() {
    Threads& all = threads();
    if (all.process != getpid()) return;  // a fork's child has none, and may find the lock held
    std::unique_lock lock(all.mutex);
    const std::vector<std::weak_ptr<void>> queues = all.queues;
    lock.unlock();
    for (const auto& queue : queues) {
        if (const auto found = std::static_pointer_cast<Queue>(queue.lock())) found->stop();
    }
    lock.lock();
    all.ended.wait(lock, [&] { return all.running == 0; });  // one may still need another
    all.closed = true;
}

}  // namespace ddl_torch
