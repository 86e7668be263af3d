// A thread that sees to what nobody waits for. Knows no framework.
#pragma once

#include <memory>

namespace ddl_torch {

// Something that ends by itself, and of which something is left to do then.
class Awaited {
  public:
    virtual ~Awaited() = default;
    virtual bool test() = 0;    // does what is left, where it is over; whether it is
    virtual void settle() = 0;  // blocks until it is over, and does what is left
};

// Settles what it is given: in that order, or, `any_order`, as each ends. Its thread starts with the first, and ends
// after the last that was given before stop(), which the destructor calls too.
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
