#include "startup/rendezvous.h"

#include <cstring>

#include "base/status.h"
#include "transport/bootstrap.h"

namespace ddl {
namespace {

constexpr int kTag = 1;
constexpr double kGraceSeconds = 5;  // beyond its own patience, in which a rank waits for rank 0 to say who is missing

std::string name(const Greeting& greeting, size_t rank) {
    return "rank " + std::to_string(rank) + " (host " + greeting.host + ")";
}

// Rank 0's: waits for everyone's greeting.
void gather(Bootstrap& bootstrap, std::vector<Greeting>& greetings) {
    std::vector<Ticket> coming(greetings.size());
    for (size_t rank = 1; rank < coming.size(); ++rank) {
        coming[rank] = bootstrap.expect(static_cast<int>(rank), kTag, &greetings[rank], sizeof greetings[rank]);
    }
    const auto missing = [&] {
        std::vector<int> ranks;
        for (size_t rank = 1; rank < coming.size(); ++rank) {
            if (coming[rank] != 0) ranks.push_back(static_cast<int>(rank));
        }
        return ranks;
    };
    bootstrap.await(missing, [&] {
        bool all = true;
        for (Ticket& ticket : coming) {
            if (ticket != 0 && bootstrap.finished(ticket)) ticket = 0;
            all &= ticket == 0;
        }
        return all;
    });
}

// What ranks ask for differently, in words; "" if all ask for the same.
std::string mismatch(const std::vector<Greeting>& greetings) {
    const Greeting& first = greetings[0];
    for (size_t rank = 1; rank < greetings.size(); ++rank) {
        const Greeting& other = greetings[rank];
        const std::string both = "ddl_init: " + name(first, 0) + " and " + name(other, rank);
        if (other.version != first.version) {
            return both + " have different versions of ddl, " + std::to_string(first.version) + " and " +
                   std::to_string(other.version) + ": install one on all hosts";
        }
        if (std::strcmp(other.options, first.options) != 0) {
            return both + " have different options, '" + first.options + "' and '" + other.options +
                   "': give every rank the same (mpirun -x DDL_OPTIONS)";
        }
        if (other.round != first.round) {
            return both + " call it for a different time, " + std::to_string(first.round + 1) + " and " +
                   std::to_string(other.round + 1) + ": every rank must call it as often";
        }
    }
    return "";
}

std::vector<std::byte> bytes_of(const void* data, size_t bytes) {
    const auto* const first = static_cast<const std::byte*>(data);
    return {first, first + bytes};
}

}  // namespace

std::vector<Greeting> call_roll(Transport& transport, const Greeting& mine, const Patience& patience,
                                const std::function<void(const std::string&)>& warn) {
    BootstrapOptions talk;
    talk.patience = patience;
    talk.warn = warn;
    Bootstrap bootstrap(transport, talk);
    std::vector<Greeting> greetings(static_cast<size_t>(transport.size()));
    greetings[static_cast<size_t>(transport.rank())] = mine;
    std::vector<std::byte> wrong, all;
    bootstrap.run([&] {
        if (transport.rank() == 0) {
            gather(bootstrap, greetings);
            const std::string text = mismatch(greetings);
            wrong = bytes_of(text.data(), text.size());
            all = bytes_of(greetings.data(), sizeof mine * greetings.size());
        } else {
            bootstrap.say(0, kTag, &mine, sizeof mine);
        }
        bootstrap.broadcast(wrong, kTag + 1, kGraceSeconds);
        bootstrap.broadcast(all, kTag + 3, kGraceSeconds);
    });
    if (!wrong.empty()) {
        throw Error(DDL_ERROR_MISMATCH, {reinterpret_cast<const char*>(wrong.data()), wrong.size()});
    }
    if (all.size() != sizeof mine * greetings.size()) {
        throw Error(DDL_ERROR_MISMATCH, "ddl_init: rank 0 has another version of ddl: install one on all hosts");
    }
    std::memcpy(greetings.data(), all.data(), all.size());
    return greetings;
}

}  // namespace ddl
