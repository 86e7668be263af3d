// The agreement of survivors, over links in this thread whose messages, deaths and news of deaths come in any order.
#include <algorithm>
#include <deque>
#include <memory>
#include <random>

#include "base/status.h"
#include "check.h"
#include "startup/agreement.h"

using namespace ddl;

namespace {

using Word = std::vector<std::byte>;

struct Cluster {
    struct Member final : Agreement::Links {
        Cluster* all = nullptr;
        int mine = -1;
        std::vector<Fate> fates;              // what this rank knows of the others
        std::vector<std::deque<Word>> inbox;  // by sender, on its way
        std::deque<std::pair<int, Word>> here;
        Word its_offer, prepared;        // of newcomers; the last one that was not empty
        uint64_t reached = 0;            // newcomers
        int pauses = 0;                  // before it is prepared
        std::vector<bool> near, parted;  // who has a connection to this rank, and whose it has ended
        int rank() const override { return mine; }
        int size() const override { return static_cast<int>(fates.size()); }
        Fate fate(int rank) const override { return fates[static_cast<size_t>(rank)]; }
        void send(int peer, const Word& word) override {
            // Who is killed in the midst of this has told some and not others.
            if (all->sends_left[static_cast<size_t>(mine)]-- <= 0) return all->kill(mine);
            ++all->sent;
            near[static_cast<size_t>(peer)] = true;
            all->members[static_cast<size_t>(peer)]->inbox[static_cast<size_t>(mine)].push_back(word);
        }
        std::vector<std::byte> offer() override { return its_offer; }
        bool prepare(const std::vector<std::byte>& offer, uint64_t* ready) override {
            if (pauses-- > 0) return false;
            if (!offer.empty()) prepared = offer;
            *ready = offer.empty() ? 0 : reached;
            return true;
        }
        bool next(int* from, Word* word) override {
            if (here.empty()) return false;
            *from = here.front().first;
            *word = std::move(here.front().second);
            here.pop_front();
            return true;
        }
    };

    explicit Cluster(int size)
        : dead(static_cast<size_t>(size)), decided(dead), sends_left(static_cast<size_t>(size), 1 << 30) {
        for (int rank = 0; rank < size; ++rank) {
            auto member = std::make_unique<Member>();
            member->all = this;
            member->mine = rank;
            member->fates.assign(static_cast<size_t>(size), Fate::here);
            member->inbox.resize(static_cast<size_t>(size));
            member->near.resize(static_cast<size_t>(size));
            member->parted.resize(static_cast<size_t>(size));
            members.push_back(std::move(member));
        }
        for (const auto& member : members) agreements.push_back(std::make_unique<Agreement>(*member));
    }
    void kill(int rank) { dead[static_cast<size_t>(rank)] = true; }
    size_t size() const { return members.size(); }
    bool poll(size_t rank) {
        if (dead[rank] || decided[rank]) return !dead[rank];
        decided[rank] = agreements[rank]->poll();
        return decided[rank];
    }
    // A rank that has decided ends its connections with the farewell, those that others make later, too.
    void part(size_t rank) {
        Member& its = *members[rank];
        for (size_t peer = 0; peer < size() && !dead[rank] && decided[rank]; ++peer) {
            if (!its.near[peer] || its.parted[peer]) continue;
            its.parted[peer] = true;
            its.send(static_cast<int>(peer), agreements[rank]->farewell());
        }
    }
    // A rank connects to those that it waits for. True if one of these connections is new.
    bool reach(size_t rank) {
        bool is_new = false;
        for (const int other : agreements[rank]->awaited()) {
            is_new |= !members[static_cast<size_t>(other)]->near[rank];
            members[static_cast<size_t>(other)]->near[rank] = true;
        }
        return is_new;
    }
    // The first message on its way arrives.
    void deliver(size_t from, size_t to) {
        Member& its = *members[to];
        its.here.emplace_back(static_cast<int>(from), std::move(its.inbox[from].front()));
        its.inbox[from].pop_front();
        its.near[from] = true;
    }

    std::vector<std::unique_ptr<Member>> members;
    std::vector<std::unique_ptr<Agreement>> agreements;
    std::vector<bool> dead, decided;
    std::vector<int> sends_left;
    size_t sent = 0;
};

// Until nothing is left to happen.
void settle(Cluster& cluster) {
    for (bool moved = true; moved;) {
        moved = false;
        for (size_t to = 0; to < cluster.size(); ++to) {
            Cluster::Member& its = *cluster.members[to];
            for (size_t from = 0; from < cluster.size(); ++from) {
                moved |= !its.inbox[from].empty();
                while (!its.inbox[from].empty()) cluster.deliver(from, to);
                if (!cluster.dead[from] || its.fates[from] != Fate::here) continue;
                its.fates[from] = Fate::ended;
                moved = true;
            }
            const bool was_dead = cluster.dead[to];
            const size_t sent = cluster.sent;
            const int pauses = its.pauses;
            cluster.poll(to);
            cluster.part(to);
            if (!cluster.dead[to] && !cluster.decided[to]) moved |= cluster.reach(to);
            moved |= its.pauses != pauses || cluster.dead[to] != was_dead || cluster.sent != sent;
        }
    }
}

}  // namespace

TEST("survivors decide the same, whoever dies at whatever moment: all of them, and newcomers that all reach") {
    const int rounds = check::kSanitized ? 3000 : 30000;
    bool some_joined = false;
    for (int round = 0; round < rounds; ++round) {
        std::mt19937 draw(static_cast<unsigned>(check::seed()) + static_cast<unsigned>(round));
        const size_t size = 2 + draw() % 6;
        Cluster cluster(static_cast<int>(size));
        for (size_t killed = draw() % size; killed > 0; --killed) {
            // Some before it begins, the others after some of their messages.
            const size_t rank = draw() % 2 == 0 ? killed - 1 : draw() % size;
            if (std::count(cluster.dead.begin(), cluster.dead.end(), true) + 1 == static_cast<int>(size)) break;
            cluster.sends_left[rank] = static_cast<int>(draw() % (2 * size));
            if (draw() % 3 == 0) cluster.kill(static_cast<int>(rank));
        }
        cluster.sends_left[size - 1] = 1 << 30;
        cluster.dead[size - 1] = false;
        for (size_t rank = 0; rank < size; ++rank) {
            Cluster::Member& its = *cluster.members[rank];
            if (rank == 0 || draw() % 4 == 0) its.its_offer.assign(draw() % 2 + 1, std::byte(rank + 1));
            its.reached = draw() % 8 | draw() % 8;
            its.pauses = static_cast<int>(draw() % 5);
        }
        for (size_t event = draw() % 200; event > 0; --event) {
            const size_t rank = draw() % size, other = draw() % size;
            Cluster::Member& its = *cluster.members[rank];
            switch (draw() % 3) {
                case 0:
                    if (!its.inbox[other].empty()) cluster.deliver(other, rank);
                    break;
                case 1:
                    if (cluster.dead[other]) its.fates[other] = Fate::ended;
                    break;
                default: cluster.poll(rank); cluster.part(rank);
            }
        }
        settle(cluster);
        const std::vector<int>& decided = cluster.agreements[size - 1]->survivors();
        const uint64_t newcomers = cluster.agreements[size - 1]->newcomers();
        some_joined |= newcomers != 0;
        for (size_t rank = 0; rank < size; ++rank) {
            if (cluster.dead[rank]) continue;
            CHECK(cluster.decided[rank]);
            CHECK(cluster.agreements[rank]->survivors() == decided);
            CHECK_EQ(cluster.agreements[rank]->newcomers(), newcomers);
            CHECK_EQ(newcomers & ~cluster.members[rank]->reached, uint64_t{0});
            // They are the same ones for all.
            if (newcomers != 0) CHECK(cluster.members[rank]->prepared == cluster.members[size - 1]->prepared);
            CHECK(std::binary_search(decided.begin(), decided.end(), static_cast<int>(rank)));
        }
    }
    CHECK(some_joined);
}

TEST("of two parts of a cut network only one goes on") {
    for (const size_t first : {1u, 2u, 3u}) {  // of 4 ranks, on one side
        Cluster cluster(4);
        for (size_t rank = 0; rank < 4; ++rank) {
            for (size_t other = 0; other < 4; ++other) {
                if ((rank < first) != (other < first)) cluster.members[rank]->fates[other] = Fate::silent;
            }
        }
        const bool first_goes_on = first >= 2;
        for (int round = 0; round < 4; ++round) {
            for (size_t to = 0; to < 4; ++to) {
                Cluster::Member& its = *cluster.members[to];
                for (size_t from = 0; from < 4; ++from) {
                    while (!its.inbox[from].empty()) cluster.deliver(from, to);
                }
                if (cluster.dead[to]) continue;
                const std::string text = check::message_of<Error>([&] { cluster.poll(to); });
                if (text.empty()) continue;
                CHECK((to < first) != first_goes_on);
                CHECK_CONTAINS(text, "was cut off from the job");
                cluster.kill(static_cast<int>(to));
                for (const auto& member : cluster.members) member->fates[to] = Fate::left;
            }
        }
        for (size_t rank = 0; rank < 4; ++rank) CHECK_EQ(!cluster.dead[rank], (rank < first) == first_goes_on);
    }
}

TEST("a rank that the others hold for dead learns it") {
    Cluster cluster(3);
    cluster.members[0]->fates[2] = cluster.members[1]->fates[2] = Fate::ended;
    CHECK_CONTAINS(check::message_of<Error>([&] { settle(cluster); }), "rank 2 was cut off from the job for a while");
    CHECK(cluster.agreements[0]->survivors() == (std::vector<int>{0, 1}));
}

TEST("512 ranks agree in six messages for each, though the leader is dead") {
    Cluster cluster(512);
    cluster.kill(0);  // the leader
    settle(cluster);
    for (size_t rank = 1; rank < 512; ++rank) CHECK_EQ(cluster.agreements[rank]->survivors().size(), size_t{511});
    // A question, an offer, a join and a decision; and at the end the farewell in both directions.
    CHECK(cluster.sent <= 6 * 511);
}
