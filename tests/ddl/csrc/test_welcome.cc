// Newcomers at the door of a job whose ranks are threads of this process, and some that stop half-way.
#include <poll.h>
#include <sys/socket.h>

#include <functional>
#include <memory>
#include <optional>
#include <thread>

#include "base/backoff.h"
#include "base/status.h"
#include "check.h"
#include "startup/front_door.h"
#include "startup/text_message.h"
#include "startup/welcome.h"
#include "store.h"

using namespace ddl;

namespace {

Start newcomer(Store& store) {
    Start start = store.member(0, 1);
    start.joins = true;
    return start;
}

void await(const std::function<bool()>& done) {
    const double deadline = seconds_now() + 60;
    for (Backoff backoff(0, 1e-3); !done(); backoff.pause()) {
        if (seconds_now() > deadline) return check::failed(__FILE__, __LINE__, "it does not come");
    }
}

// What the ranks are ready for, each for itself, and how long that takes.
struct Ranks {
    explicit Ranks(int size) {
        for (int rank = 0; rank < size; ++rank) all.push_back(std::make_unique<Welcome>(rank, size));
    }
    std::vector<uint64_t> prepare(const std::string& offer) {
        const double begin = seconds_now();
        std::vector<uint64_t> ready(all.size());
        std::vector<bool> done(all.size());
        await([&] {
            bool settled = true;
            for (size_t rank = 0; rank < all.size(); ++rank) {
                if (!done[rank]) done[rank] = all[rank]->prepare(offer, &ready[rank]);
                settled = settled && done[rank];
            }
            return settled;
        });
        CHECK(seconds_now() - begin < kMeetSeconds + 5);
        return ready;
    }
    std::vector<std::unique_ptr<Welcome>> all;
};

// A newcomer that goes no further than this.
enum class Stage { knocks, is_invited, connects, is_ready };
class Hesitant {
  public:
    Hesitant(Store& store, Stage stage) : stage_(stage) {
        std::string value;
        store.member(0, 1).get(kDoorKey, &value, 60);
        const size_t space = value.find(' ');
        connector_.set_token(store.member(0, 1).key(value.substr(0, space)));
        connector_.connect(0, value.substr(space + 1));
        await([&] {
            serve();
            return connector_.is_connected(0);
        });
        send_text(sockets_[0], std::to_string(kVersion) + "\n\n" + connector_.contact(), seconds_now() + 60);
    }
    // With as many ranks, after they have been offered it. It is the only one.
    void go_on(size_t ranks) {
        if (stage_ == Stage::knocks) return;
        std::string text;
        CHECK(receive_text(sockets_[0], &text, 1 << 20, seconds_now() + 60) == Delivery::done);
        if (stage_ == Stage::is_invited) return;
        sockets_ = std::vector<Socket>(1 + ranks);
        connector_.take_seat(0, static_cast<int>(1 + ranks));
        connector_.let_in();
        thread_ = std::thread([this, ranks] {
            await([&] {
                serve();
                size_t here = 0;
                for (size_t rank = 0; rank < ranks; ++rank) here += connector_.is_connected(static_cast<int>(1 + rank));
                return here == ranks;
            });
            for (size_t rank = 0; rank < ranks; ++rank) {
                if (stage_ == Stage::is_ready) send(sockets_[1 + rank].fd(), "r", 1, MSG_NOSIGNAL);
            }
        });
    }
    ~Hesitant() {
        if (thread_.joinable()) thread_.join();
    }

  private:
    void serve() {
        connector_.serve(1);
        for (Connector::News news; connector_.next(&news);) {
            sockets_[static_cast<size_t>(news.peer)] = std::move(news.socket);
        }
    }

    const Stage stage_;
    std::vector<Socket> sockets_ = std::vector<Socket>(kSeats);
    Connector connector_{100, kSeats};
    std::thread thread_;
};

// True if a byte passes both ways.
bool is_linked(const TcpLinks::Link& one, const TcpLinks::Link& other) {
    const auto passes = [](const Socket& from, const Socket& to) {
        char byte = 'x';
        pollfd wait{to.fd(), POLLIN, 0};
        return send(from.fd(), &byte, 1, MSG_NOSIGNAL) == 1 && poll(&wait, 1, 10000) == 1 &&
               recv(to.fd(), &byte, 1, 0) == 1;
    };
    if (!one.connection || !other.connection) return false;
    const Socket &here = one.connection->socket(), &there = other.connection->socket();
    return passes(here, there) && passes(there, here);
}

}  // namespace

TEST("newcomers are connected to every rank that goes on and to one another") {
    Store store;
    FrontDoor door(store.member(0, 3), "");
    std::vector<std::optional<Admission>> made(3);
    std::vector<std::thread> threads;
    for (auto& mine : made) {
        threads.emplace_back([&] { mine = join(newcomer(store), "", {1, 10, 60}, [](const std::string&) {}); });
    }
    await([&] { return door.waiting() == 3; });
    Ranks ranks(3);
    const std::string offer = door.invite(3);
    CHECK_EQ(door.waiting(), 0);
    CHECK(ranks.prepare(offer) == std::vector<uint64_t>(3, 7));
    CHECK(ranks.prepare("") == std::vector<uint64_t>(3, 0));  // of a leader that nobody has told
    CHECK(ranks.prepare(offer) == std::vector<uint64_t>(3, 7));
    // Rank 1 dies, and the second newcomer is not taken.
    std::vector<std::vector<TcpLinks::Link>> links(3);
    for (const size_t rank : {0u, 2u}) links[rank] = ranks.all[rank]->admit(5, {4, 6, 0, {0, 2}});
    ranks.all[1].reset();
    // It knocks again.
    await([&] { return door.waiting() == 1; });
    Ranks later(1);
    CHECK(later.prepare(door.invite(1)) == std::vector<uint64_t>{1});
    const auto last = later.all[0]->admit(1, {5, 7, 0, {0}});
    for (std::thread& thread : threads) thread.join();
    std::vector<Admission*> taken(4);
    for (auto& one : made) {
        if (one->members.epoch == 4) taken[static_cast<size_t>(one->members.rank)] = &*one;
        CHECK_EQ(one->members.round, one->members.epoch == 4 ? 6 : 7);
        CHECK(one->members.former == std::vector<int>(one->members.epoch == 4 ? 4 : 2, -1));
    }
    CHECK(taken[2] && taken[3]);
    for (const size_t place : {2u, 3u}) {
        CHECK_EQ(taken[place]->links.ranks.size(), size_t{4});
        CHECK(is_linked(taken[place]->links.ranks[0], links[0][place - 2]));
        CHECK(is_linked(taken[place]->links.ranks[1], links[2][place - 2]));
    }
    CHECK(is_linked(taken[2]->links.ranks[3], taken[3]->links.ranks[2]));
}

TEST("a newcomer believes the later of two decisions, as those that made it are alive") {
    Store store;
    FrontDoor door(store.member(0, 3), "");
    std::optional<Admission> made;
    std::thread thread([&] { made = join(newcomer(store), "", {1, 10, 60}, [](const std::string&) {}); });
    await([&] { return door.waiting() == 1; });
    Ranks ranks(3);
    CHECK(ranks.prepare(door.invite(3)) == std::vector<uint64_t>(3, 1));
    // Rank 0 decides, takes it in and dies, before the others know.
    CHECK_EQ(ranks.all[0]->admit(1, {4, 6, 0, {0, 1, 2}}).size(), size_t{1});
    for (const size_t rank : {1u, 2u}) ranks.all[rank]->admit(1, {4, 6, 1, {1, 2}});
    thread.join();
    CHECK_EQ(made->links.ranks.size(), size_t{3});
    CHECK_EQ(made->members.rank, 2);
    CHECK(made->links.ranks[0].connection && made->links.ranks[1].connection);
}

TEST("a newcomer gives no rank up that may still take it in") {
    Store store;
    FrontDoor door(store.member(0, 2), "");
    std::string text;
    std::thread thread([&] {
        text = check::message_of<Error>([&] { join(newcomer(store), "", {1, 1, 2}, [](const std::string&) {}); });
    });
    await([&] { return door.waiting() == 1; });
    Ranks ranks(2);
    CHECK(ranks.prepare(door.invite(2)) == std::vector<uint64_t>(2, 1));
    const auto links = ranks.all[0]->admit(1, {4, 6, 0, {0, 1}});  // rank 1 is stopped
    thread.join();
    CHECK_CONTAINS(text, "rank 1 has not said so");
    // It is out, and both learn so.
    const auto late = ranks.all[1]->admit(1, {4, 6, 0, {0, 1}});
    for (const auto* its : {&links[0], &late[0]}) {
        char byte = 0;
        CHECK(its->is_lost || recv(its->connection->socket().fd(), &byte, 1, 0) <= 0);
    }
}

TEST("a newcomer that stops or dies at whatever step keeps the ranks for a few seconds at most") {
    for (const Stage stage : {Stage::knocks, Stage::is_invited, Stage::connects, Stage::is_ready}) {
        for (const bool dies : {true, false}) {
            Store store;
            FrontDoor door(store.member(0, 2), "");
            auto hesitant = std::make_unique<Hesitant>(store, stage);
            await([&] { return door.waiting() == 1; });
            if (dies && stage == Stage::knocks) {
                hesitant.reset();
                await([&] { return door.waiting() == 0; });
                CHECK_EQ(door.invite(2), std::string());
                continue;
            }
            Ranks ranks(2);
            const std::string offer = door.invite(2);
            hesitant->go_on(2);
            if (dies && stage == Stage::is_invited) hesitant.reset();
            const uint64_t ready = stage == Stage::is_ready ? 1 : 0;
            CHECK(ranks.prepare(offer) == std::vector<uint64_t>(2, ready));
            if (dies) hesitant.reset();
            for (const auto& rank : ranks.all) CHECK_EQ(rank->admit(ready, {1, 1, 0, {0, 1}}).size(), size_t{ready});
        }
    }
}

TEST("who has another version or other options is told so, and strangers are none who wait") {
    Store store;
    FrontDoor door(store.member(0, 1), "-mode r");
    const auto text =
        check::message_of<Error>([&] { join(newcomer(store), "-mode p", {1, 10, 60}, [](const std::string&) {}); });
    CHECK_CONTAINS(text, "its options are '-mode p', and the job's '-mode r'");
    CHECK_EQ(door.waiting(), 0);
}

TEST("who waits in vain is told for what") {
    Store store;
    const auto knock = [&] {
        return check::message_of<Error>([&] { join(newcomer(store), "", {1, 10, 0.3}, [](const std::string&) {}); });
    };
    CHECK_CONTAINS(knock(), "nobody has opened the door");
    FrontDoor door(store.member(0, 1), "");
    CHECK_CONTAINS(knock(), "its ranks must call ddl_resize");
}
