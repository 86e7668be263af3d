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
        int rank() const override { return mine; }
        int size() const override { return static_cast<int>(fates.size()); }
        Fate fate(int rank) const override { return fates[static_cast<size_t>(rank)]; }
        void send(int peer, const Word& word) override {
            // Who is killed in the midst of this has told some and not others.
            if (all->sends_left[static_cast<size_t>(mine)]-- <= 0) return all->kill(mine);
            ++all->sent;
            all->members[static_cast<size_t>(peer)]->inbox[static_cast<size_t>(mine)].push_back(word);
        }
        bool next(int* from, Word* word) override {
            if (here.empty()) return false;
            *from = here.front().first;
            *word = std::move(here.front().second);
            here.pop_front();
            return true;
        }
    };

    explicit Cluster(int size) : dead(static_cast<size_t>(size)), sends_left(static_cast<size_t>(size), 1 << 30) {
        for (int rank = 0; rank < size; ++rank) {
            auto member = std::make_unique<Member>();
            member->all = this;
            member->mine = rank;
            member->fates.assign(static_cast<size_t>(size), Fate::here);
            member->inbox.resize(static_cast<size_t>(size));
            members.push_back(std::move(member));
        }
        for (const auto& member : members) agreements.push_back(std::make_unique<Agreement>(*member));
    }
    void kill(int rank) { dead[static_cast<size_t>(rank)] = true; }
    size_t size() const { return members.size(); }
    bool poll(size_t rank) { return !dead[rank] && agreements[rank]->poll(); }

    std::vector<std::unique_ptr<Member>> members;
    std::vector<std::unique_ptr<Agreement>> agreements;
    std::vector<bool> dead;
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
                for (Word& word : its.inbox[from]) its.here.emplace_back(static_cast<int>(from), std::move(word));
                its.inbox[from].clear();
                if (!cluster.dead[from] || its.fates[from] != Fate::here) continue;
                its.fates[from] = Fate::ended;
                moved = true;
            }
            const bool was_dead = cluster.dead[to];
            const size_t sent = cluster.sent;
            cluster.poll(to);
            moved |= cluster.dead[to] != was_dead || cluster.sent != sent;
        }
    }
}

}  // namespace

TEST("survivors decide the same, whoever dies at whatever moment, and all of them are in it") {
    const int rounds = check::kSanitized ? 3000 : 30000;
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
        for (size_t event = draw() % 200; event > 0; --event) {
            const size_t rank = draw() % size, other = draw() % size;
            Cluster::Member& its = *cluster.members[rank];
            switch (draw() % 3) {
                case 0:
                    if (its.inbox[other].empty()) break;
                    its.here.emplace_back(static_cast<int>(other), std::move(its.inbox[other].front()));
                    its.inbox[other].pop_front();
                    break;
                case 1:
                    if (cluster.dead[other]) its.fates[other] = Fate::ended;
                    break;
                default: cluster.poll(rank);
            }
        }
        settle(cluster);
        const std::vector<int>& decided = cluster.agreements[size - 1]->survivors();
        for (size_t rank = 0; rank < size; ++rank) {
            if (cluster.dead[rank]) continue;
            CHECK(cluster.agreements[rank]->poll());
            CHECK(cluster.agreements[rank]->survivors() == decided);
            CHECK(std::binary_search(decided.begin(), decided.end(), static_cast<int>(rank)));
        }
    }
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
                    for (Word& word : its.inbox[from]) its.here.emplace_back(static_cast<int>(from), std::move(word));
                    its.inbox[from].clear();
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

TEST("512 ranks agree in two messages for each, and one more for each pair") {
    Cluster cluster(512);
    cluster.kill(0);  // the leader
    settle(cluster);
    for (size_t rank = 1; rank < 512; ++rank) CHECK_EQ(cluster.agreements[rank]->survivors().size(), size_t{511});
    CHECK(cluster.sent <= 2 * 511 + 511 * 511);  // two: some join the dead leader first
}
