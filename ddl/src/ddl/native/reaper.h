// Threads that see to what nobody waits for. Knows no framework.
#pragma once

#include <memory>

namespace ddl_torch {

// Something that ends by itself, and of which something is left to do then.
class Awaited {
  public:
    virtual ~Awaited() = default;
    virtual bool test() = 0;    // whether it is over
    virtual void wait() = 0;    // blocks until it is
    virtual void settle() = 0;  // does what is left then
};

// Settles what it is given: in that order, or, `any_order`, as each ends. Its threads start when they are needed, and
// end after the last that was given before stop(), which the destructor calls too.
//
// What is left to do may take long: a callback of a future may wait for another work's. So one thread waits at a time,
// and settles nothing while it does; who settles leaves the waiting to another.
class Reaper {
  public:
    explicit Reaper(bool any_order);
    ~Reaper() { stop(); }
    Reaper(const Reaper&) = delete;
    Reaper& operator=(const Reaper&) = delete;

    void add(std::unique_ptr<Awaited> it);
    void stop();

    // Ends the threads of all reapers, which is possible once all that they wait for is over, and starts no other.
    static void end_threads();

  private:
    struct Queue;
    std::shared_ptr<Queue> queue_;
};

}  // namespace ddl_torch
