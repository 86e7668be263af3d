// The communicators of a rank by number, and which numbers are free.
#pragma once

#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "engine/communicator.h"

namespace ddl {

// Thread-safe. It has a lock of its own, which nothing else is done under. It changes only with the progress lock held,
// except for numbers that are reserved.
class Table {
  public:
    // Null if there is none.
    CommPtr find(CommId id) const {
        const std::lock_guard lock(mutex_);
        const CommPtr* const found = find_held(id);
        return found ? *found : nullptr;
    }
    CommPtr find(const CommKey& key) const {
        CommPtr comm = find(key.id);
        return comm && comm->key == key ? comm : nullptr;
    }
    // The same for who holds the progress lock.
    const CommPtr* find_held(CommId id) const {
        const auto found = comms_.find(id);
        return found == comms_.end() ? nullptr : &found->second;
    }
    void add(const CommPtr& comm) {
        const std::lock_guard lock(mutex_);
        comms_[comm->key.id] = comm;
        free_ids_[comm->key.id] = 0;  // as a reservation has done already
    }
    void remove(CommId id, bool is_free_again) {
        const std::lock_guard lock(mutex_);
        comms_.erase(id);
        free_ids_[id] = is_free_again;
    }
    size_t size() const {
        const std::lock_guard lock(mutex_);
        return comms_.size();
    }
    // Takes all out.
    std::map<CommId, CommPtr> clear() {
        const std::lock_guard lock(mutex_);
        return std::exchange(comms_, {});
    }
    std::map<CommId, CommPtr> all() const {
        const std::lock_guard lock(mutex_);
        return comms_;
    }
    // By number: 1 if it is free.
    std::vector<uint8_t> free_ids() const {
        const std::lock_guard lock(mutex_);
        return free_ids_;
    }

    // A number that a rank takes for a communicator which may not come to be.
    class Reservation {
      public:
        explicit Reservation(Table& table) : table_(table) {}
        ~Reservation() { give_back(); }
        Reservation(const Reservation&) = delete;
        Reservation& operator=(const Reservation&) = delete;

        // Takes `id` instead of what it had; false if it is not free here.
        bool take(CommId id) {
            give_back();
            const std::lock_guard lock(table_.mutex_);
            id_ = id;
            return taken_ = std::exchange(table_.free_ids_[id], uint8_t{0}) == 1;
        }
        CommId id() const { return id_; }
        bool is_taken() const { return taken_; }
        // For the others to take.
        void give_back() {
            const std::lock_guard lock(table_.mutex_);
            if (std::exchange(taken_, false)) table_.free_ids_[id_] = 1;
        }
        // The communicator has come to be: the number is its own.
        CommId keep() {
            taken_ = false;
            return id_;
        }

      private:
        Table& table_;
        CommId id_ = 0;
        bool taken_ = false;
    };

  private:
    mutable std::mutex mutex_;
    std::map<CommId, CommPtr> comms_;
    std::vector<uint8_t> free_ids_ = std::vector<uint8_t>(kMostCommunicators, 1);
};

}  // namespace ddl
