// An id that a rank takes for a communicator which may not come to be. Internal to the engine.
#pragma once

#include "engine/engine.h"

namespace ddl {

class Engine::Reservation {
  public:
    explicit Reservation(Engine& engine) : engine_(engine) {}
    ~Reservation() { give_back(); }
    Reservation(const Reservation&) = delete;
    Reservation& operator=(const Reservation&) = delete;

    // Takes `id` instead of what it had; false if it is not free here.
    bool take(CommId id) {
        give_back();
        const std::lock_guard lock(engine_.table_);
        id_ = id;
        taken_ = engine_.free_ids_[id] == 1;
        engine_.free_ids_[id] = 0;
        return taken_;
    }
    CommId id() const { return id_; }
    bool is_taken() const { return taken_; }
    // For the others to take.
    void give_back() {
        const std::lock_guard lock(engine_.table_);
        if (taken_) engine_.free_ids_[id_] = 1;
        taken_ = false;
    }
    // The communicator has come to be: the id is its own.
    CommId keep() {
        taken_ = false;
        return id_;
    }

  private:
    Engine& engine_;
    CommId id_ = 0;
    bool taken_ = false;
};

}  // namespace ddl
