#include "check.h"
#include "engine/watch.h"

using namespace ddl;

namespace {

using Verdict = Watch::Verdict;

const Group kGroup{{0, 1, 2, 3}, {"rank 0", "rank 1", "rank 2", "rank 3"}};

Header call(uint64_t sequence) {
    return make_header({Collective::allreduce, DDL_FLOAT32, DDL_SUM, 10, 0}, {}, sequence, 0);
}

}  // namespace

TEST("a stall is asked about, warned of once and given up, in this order") {
    Watch watch({1, 10, 30});
    int asked = 0, warned = 0;
    double at = 0;
    for (;; at += 0.01) {
        const Verdict verdict = watch.judge(at);
        if (verdict == Verdict::give_up) break;
        asked += verdict == Verdict::ask;
        if (verdict == Verdict::warn) {
            ++warned;
            CHECK(at >= 10 && at < 10.1);
            CHECK_EQ(asked, 5);  // after 1, 2, 4, 8 and, so that the warning is up to date, 9 seconds
        }
    }
    CHECK_EQ(warned, 1);
    CHECK(at >= 29.99 && at < 30.1);
    CHECK_EQ(asked, 7);  // and after 18 and 27
}

TEST("however short the times are, asking ends, and long stalls are asked about every so often") {
    Watch hasty({0, 0, 30});
    CHECK(hasty.judge(0.5) == Verdict::ask);
    CHECK(hasty.judge(0.5) == Verdict::warn);
    Watch watch({1, 10, 300});
    int asked = 0;
    for (double at = 0; at < 200; at += 0.01) asked += watch.judge(at) == Verdict::ask;
    CHECK(asked >= 20);
}

TEST("progress begins a new stall") {
    Watch watch({1, 10, 30});
    CHECK(watch.judge(1) == Verdict::ask);
    watch.answer(1, false, call(3), Leave::finalized);
    CHECK(watch.hopeless());
    watch.progress();
    CHECK(!watch.hopeless());
    CHECK(watch.judge(0.5) == Verdict::wait);
    CHECK(watch.judge(1) == Verdict::ask);
}

TEST("the report names who is missing, who is silent and who has left, with their last calls") {
    Watch watch({1, 10, 30});
    watch.answer(1, true, call(5), Leave::no);
    watch.answer(2, false, call(4), Leave::no);
    const std::string text = watch.report(kGroup, 0, {1});
    CHECK(!check::contains(text, "rank 1"));
    CHECK_CONTAINS(text, "rank 2 has not called it; its last call was allreduce #4 of communicator 0");
    CHECK_CONTAINS(text, "rank 3 does not answer");
    watch.answer(2, false, call(4), Leave::freed);
    CHECK_CONTAINS(watch.report(kGroup, 0, {1}), "rank 2 has freed the communicator without calling it; its last call");
    watch.answer(3, false, Header{}, Leave::finalized);
    CHECK_CONTAINS(watch.report(kGroup, 0, {1}),
                   "rank 3 has finalized without calling it; it has made no call on this communicator");
}

TEST("if a rank has left, those that had no time to answer are not suspected") {
    Watch watch({1, 10, 30});
    watch.answer(2, false, call(4), Leave::finalized);
    const std::string text = watch.report(kGroup, 0, {1});
    CHECK_CONTAINS(text, "rank 2 has finalized without calling it");
    CHECK(!check::contains(text, "does not answer"));
}

TEST("if all have arrived, the report names whose data is awaited") {
    Watch watch({1, 10, 30});
    for (const int rank : {1, 2, 3}) watch.answer(rank, true, call(5), Leave::no);
    CHECK_CONTAINS(watch.report(kGroup, 0, {1, 3}), "no data arrives from rank 1, rank 3: check the links");
}

TEST("a rank that waits for its own GPU says so, and is named by the others, who ask it again") {
    Watch watch({1, 10, 30});
    CHECK_EQ(watch.report(kGroup, 0, {}, "its GPU"), std::string("it waits for its GPU"));
    for (const int rank : {1, 2, 3}) watch.answer(rank, true, call(5), Leave::no, rank == 2 ? "its GPU" : "");
    const std::string text = watch.report(kGroup, 0, {1});
    CHECK_EQ(text, std::string("rank 2 has called it, and waits for its GPU"));
    watch.to_ask(4, 0, 2, {1});
    CHECK(watch.to_ask(4, 0, 2, {1}) == std::vector<int>({2}));
}

TEST("those that a message is awaited from are asked first, then whoever has not said that it came") {
    Watch watch({1, 10, 30});
    CHECK(watch.to_ask(4, 1, 2, {0}) == std::vector<int>({0}));
    watch.answer(0, true, call(0), Leave::no);
    CHECK(watch.to_ask(4, 1, 2, {0}) == std::vector<int>({2, 3}));
    watch.answer(2, false, call(0), Leave::no);
    CHECK(watch.to_ask(4, 1, 2, {0}) == std::vector<int>({2, 3}));
    watch.progress();
    CHECK(watch.to_ask(4, 1, 2, {3}) == std::vector<int>({3}));
}

TEST("in a large job all are asked only when the warning is near") {
    Watch watch({1, 10, 30});
    for (const double stalled : {1., 2., 8.}) CHECK(watch.to_ask(100, 0, stalled, {7}) == std::vector<int>({7}));
    CHECK_EQ(watch.to_ask(100, 0, 9, {7}).size(), size_t{99});
}
