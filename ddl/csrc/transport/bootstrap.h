// Blocking messages between the ranks of a job, for what comes before the engine: a rank that dies, stays silent or
// fails ends the wait of every other with an error that names it.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/backoff.h"
#include "base/patience.h"
#include "transport/transport.h"

namespace ddl {

struct BootstrapOptions {
    std::string what = "ddl_init";   // what is done, for messages
    Patience patience;               // ask_seconds is not used
    std::vector<std::string> hosts;  // of each rank, for messages; may be empty
    std::function<void(const std::string&)> warn;
    int spins = 10;             // polls before a wait yields its core
    double nap_seconds = 2e-4;  // longest sleep between polls
};

using Block = std::unique_ptr<std::byte[]>;

class Bootstrap {
  public:
    Bootstrap(Transport& transport, BootstrapOptions options);
    ~Bootstrap();  // takes back what is still posted
    Bootstrap(const Bootstrap&) = delete;
    Bootstrap& operator=(const Bootstrap&) = delete;

    Transport& transport() { return transport_; }
    int rank() const { return transport_.rank(); }
    int size() const { return transport_.size(); }
    std::string name(int rank) const;  // "rank 3 (host b)"
    std::string host(int rank) const;  // "b"; "" if it is not known

    // Runs `body`. If it throws Error or std::bad_alloc on one rank, the others' waits end with its error.
    void run(const std::function<void()>& body);

    // Moves messages along until done() is true; `whom` are the ranks that it depends on. Throws Error:
    // DDL_ERROR_PEER_LOST if any rank of the job is dead, or one of these has left it, DDL_ERROR_TIMEOUT after the
    // patience's time and `grace_seconds` more, or the error of another rank.
    void await(const std::function<std::vector<int>()>& whom, const std::function<bool()>& done,
               double grace_seconds = 0);
    void await(int peer, const std::function<bool()>& done, double grace_seconds = 0) {
        await([=] { return std::vector<int>{peer}; }, done, grace_seconds);
    }

    // Posted messages; their memory is in use until finished() was true, which also frees the ticket, or cancel().
    // Where that is false, the memory stays in use: give it to keep().
    Ticket send(int peer, Tag tag, const void* data, size_t bytes);
    Ticket receive(int peer, Tag tag, void* data, size_t capacity);
    bool finished(Ticket ticket, size_t* received = nullptr);
    bool cancel(Ticket ticket);
    // As receive(), and copies the message to `data` in the finished() that is true: `data` is not in use otherwise.
    Ticket expect(int peer, Tag tag, void* data, size_t capacity);
    // Keeps memory until the process ends.
    static void keep(Block memory);

    // Blocking forms, for short messages: they are copied. A receive returns the message's length.
    void say(int peer, Tag tag, const void* data, size_t bytes);
    size_t hear(int peer, Tag tag, void* data, size_t capacity, double grace_seconds = 0);

    // Notices that came meanwhile and are none of a bootstrap's, in their order: of ranks that are further, whose
    // engines say goodbye already.
    std::vector<Notice> take_foreign() { return std::move(foreign_); }

    // Returns when all of `members`, this rank among them, have called it. Uses one tag.
    void barrier(const std::vector<int>& members, Tag tag);
    // Gives rank 0's bytes to every rank; the others wait `grace_seconds` longer than usual. Uses two tags.
    void broadcast(std::vector<std::byte>& data, Tag tag, double grace_seconds);

  private:
    struct Open {
        Ticket ticket = 0;
        Block memory;            // of the message, if it is ours
        void* target = nullptr;  // to which it is copied when it has arrived
    };
    void give_up(int code, const char* text) noexcept;
    void look_around();
    std::vector<Open>::iterator find(Ticket ticket);

    Transport& transport_;
    const BootstrapOptions options_;
    std::vector<Open> open_;
    std::vector<Notice> foreign_;
    double next_look_ = 0;
    bool moved_ = false;  // a message came to its end: more may follow soon
};

}  // namespace ddl
