#include "reaper.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <list>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace ddl_torch {
namespace {

using Nap = std::chrono::microseconds;
constexpr Nap kShortestNap{20};  // between two looks
constexpr Nap kLongestNap{1000};

}  // namespace

struct Reaper::Queue {
    explicit Queue(bool any_order) : any_order(any_order) {}

    const bool any_order;
    std::mutex mutex;  // guards the rest
    std::condition_variable changed;
    std::deque<std::unique_ptr<Awaited>> waiting;
    bool started = false;
    bool stopping = false;
    std::thread::id thread;

    void stop() {
        const std::lock_guard lock(mutex);
        stopping = true;
        changed.notify_all();
    }

    void serve() {
        {
            const std::lock_guard lock(mutex);
            thread = std::this_thread::get_id();
        }
        any_order ? settle_any() : settle_in_order();
    }

  private:
    // With the lock held. What is added later begins another thread.
    void ended() { started = stopping = false; }

    void settle_in_order() {
        for (;;) {
            std::unique_lock lock(mutex);
            changed.wait(lock, [&] { return stopping || !waiting.empty(); });
            if (waiting.empty()) return ended();
            const std::unique_ptr<Awaited> first = std::move(waiting.front());
            waiting.pop_front();
            lock.unlock();
            first->settle();
        }
    }

    void settle_any() {
        std::list<std::unique_ptr<Awaited>> mine;
        Nap nap = kShortestNap;
        for (;;) {
            {
                std::unique_lock lock(mutex);
                const auto is_new = [&] { return !waiting.empty(); };
                if (mine.empty()) {
                    changed.wait(lock, [&] { return stopping || is_new(); });
                    if (waiting.empty()) return ended();
                } else if (!changed.wait_for(lock, nap, is_new)) {
                    nap = std::min(2 * nap, kLongestNap);
                }
                if (is_new()) nap = kShortestNap;
                for (; !waiting.empty(); waiting.pop_front()) mine.push_back(std::move(waiting.front()));
            }
            for (auto it = mine.begin(); it != mine.end();) it = (*it)->test() ? mine.erase(it) : std::next(it);
        }
    }
};

namespace {

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

template <typename Body>
void start(Body body) {
    Threads& all = threads();
    const std::lock_guard lock(all.mutex);
    if (all.closed || all.process != getpid()) return;
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
}

}  // namespace

Reaper::Reaper(bool any_order) : queue_(std::make_shared<Queue>(any_order)) {
    Threads& all = threads();
    const std::lock_guard lock(all.mutex);
    all.queues.erase(
        std::remove_if(all.queues.begin(), all.queues.end(), [](const auto& queue) { return queue.expired(); }),
        all.queues.end());
    all.queues.push_back(queue_);
}

void Reaper::add(std::unique_ptr<Awaited> it) {
    const std::lock_guard lock(queue_->mutex);
    if (queue_->thread == std::this_thread::get_id()) {
        // A future's callback has made this call, and may wait for it: not by the thread that it keeps busy.
        return start([its = std::shared_ptr<Awaited>(std::move(it))] { its->settle(); });
    }
    queue_->waiting.push_back(std::move(it));
    if (!queue_->started) start([queue = queue_] { queue->serve(); });
    queue_->started = true;
    queue_->changed.notify_all();
}

void Reaper::stop() { queue_->stop(); }

void Reaper::end_threads() {
    Threads& all = threads();
    if (all.process != getpid()) return;  // a fork's child has none, and may find the lock held
    std::unique_lock lock(all.mutex);
    all.closed = true;
    const std::vector<std::weak_ptr<void>> queues = all.queues;
    lock.unlock();
    for (const auto& queue : queues) {
        if (const auto found = std::static_pointer_cast<Queue>(queue.lock())) found->stop();
    }
    lock.lock();
    all.ended.wait(lock, [&] { return all.running == 0; });
}

}  // namespace ddl_torch
