#include <cstring>
#include <functional>
#include <vector>

#include "check.h"
#include "engine/header.h"

using namespace ddl;

namespace {

Header call() {
    return make_header({Collective::broadcast, DDL_FLOAT32, DDL_SUM, 1000, 3}, {7, 0x1234}, 70000, 0x5678, 0x9abc);
}

bool packed_alike(const Header& a, const Header& b) {
    const PackedHeader one = pack(a), other = pack(b);
    return std::memcmp(&one, &other, sizeof one) == 0;
}

}  // namespace

TEST("ranks that made the same call pack the same bytes") {
    CHECK(packed_alike(call(), call()));
    CHECK(same_call(unpack(pack(call()), call()), call()));
}

TEST("whatever differs between two calls differs between their packed headers, and is described") {
    struct Change {
        const char* what;  // in the description
        std::function<void(Header&)> apply;
    };
    const std::vector<Change> changes = {
        {"2000 elements", [](Header& h) { h.count = 2000; }},
        {"root 5", [](Header& h) { h.root = 5; }},
        {"int64", [](Header& h) { h.type = DDL_INT64; }},
        {"allgather", [](Header& h) { h.collective = static_cast<uint8_t>(Collective::allgather); }},
        {"split", [](Header& h) { h.purpose = static_cast<uint8_t>(Purpose::split); }},
        {"broadcast #70016", [](Header& h) { h.sequence += 16; }},
        {"broadcast #69984", [](Header& h) { h.sequence -= 16; }},
        {"a GPU's memory", [](Header& h) { h.by_nccl = 1; }},
        {"different plans", [](Header& h) { h.layout ^= uint64_t{1} << 63; }},
        {"before it differ", [](Header& h) { h.past ^= 1; }},
        {"earlier communicator", [](Header& h) { h.birth ^= 1; }},
    };
    for (const Change& change : changes) {
        Header theirs = call();
        change.apply(theirs);
        CHECK(!packed_alike(theirs, call()));
        const Header seen = unpack(pack(theirs), call());
        CHECK(!same_call(seen, call()));
        CHECK_CONTAINS(describe_mismatch("rank 0", call(), "rank 1", seen), change.what);
    }
}

TEST("no bit of a hashed field is lost in a packed header") {
    for (int bit = 0; bit < 64; ++bit) {
        const uint64_t flip = uint64_t{1} << bit;
        Header theirs = call();
        theirs.layout ^= flip;
        CHECK(!packed_alike(theirs, call()));
        CHECK(!same_call(unpack(pack(theirs), call()), call()));
        theirs = call();
        theirs.past ^= flip;
        CHECK(!packed_alike(theirs, call()));
        theirs = call();
        theirs.birth ^= flip;
        CHECK(!packed_alike(theirs, call()));
    }
}

TEST("a digest that alone differs is a mismatch") {
    PackedHeader other = pack(call());
    other.digest ^= 1;
    CHECK(!same_call(unpack(other, call()), call()));
}
