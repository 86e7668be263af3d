#include "startup/rendezvous.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "base/backoff.h"
#include "transport/bootstrap.h"
#include "transport/mpi_watch.h"

namespace ddl {
namespace {

constexpr int kTag = 1;
constexpr double kCalmSeconds = 1;   // in which nobody is suspected
constexpr double kGraceSeconds = 5;  // beyond its own patience, in which a rank waits for rank 0 to say who is missing
constexpr size_t kShown = 8;

// What rank 0 found out, for all.
struct Verdict {
    int32_t code = DDL_SUCCESS;
    char text[1020] = "";
};

// Memory that MPI writes to. It stays where a request on it was not completed: MPI may write to it later.
struct Board {
    std::vector<Greeting> greetings;
    std::vector<MPI_Request> requests;
    Verdict verdict;
};

std::string name(const Greeting& greeting, size_t rank) {
    return "rank " + std::to_string(rank) + " (host " + greeting.host + ")";
}

std::string missing_ranks(const std::vector<MPI_Request>& requests, const std::string& what) {
    std::string text;
    size_t count = 0;
    for (size_t rank = 1; rank < requests.size(); ++rank) {
        if (requests[rank] == MPI_REQUEST_NULL) continue;
        if (++count <= kShown) text += (text.empty() ? "" : ", ") + std::to_string(rank);
    }
    const std::string more = count > kShown ? " and " + std::to_string(count - kShown) + " more" : "";
    return (count == 1 ? "rank " : "ranks ") + text + more + (count == 1 ? " has " : " have ") + what;
}

void set(Verdict* verdict, Code code, const std::string& text) {
    verdict->code = code;
    const size_t length = std::min(text.size(), sizeof verdict->text - 1);
    std::memcpy(verdict->text, text.data(), length);
    verdict->text[length] = '\0';
}

// Rank 0's: waits for everyone's greeting.
void gather(MPI_Comm base, Board& board, const RendezvousOptions& options) {
    const size_t size = board.greetings.size();
    for (size_t rank = 1; rank < size; ++rank) {
        check_mpi(MPI_Irecv(&board.greetings[rank], sizeof(Greeting), MPI_BYTE, static_cast<int>(rank), kTag, base,
                            &board.requests[rank]),
                  "MPI_Irecv");
    }
    const double start = seconds_now();
    bool warned = false;
    for (Backoff backoff(0, 1e-3);; backoff.pause()) {
        int finished = 0;
        {
            const MpiCall call;
            check_mpi(MPI_Testall(static_cast<int>(size), board.requests.data(), &finished, MPI_STATUSES_IGNORE),
                      "MPI_Testall");
        }
        if (finished) return;
        const double waited = seconds_now() - start;
        if (waited < kCalmSeconds) continue;
        // MPI_Testall completes all or none; only now is it worth asking one by one.
        for (MPI_Request& request : board.requests) MPI_Test(&request, &finished, MPI_STATUS_IGNORE);
        for (size_t rank = 1; rank < size; ++rank) {
            if (board.requests[rank] == MPI_REQUEST_NULL || !options.is_dead(static_cast<int>(rank))) continue;
            return set(&board.verdict, DDL_ERROR_PEER_LOST,
                       "ddl_init: rank " + std::to_string(rank) + " died before it called it");
        }
        const bool late = waited >= options.patience.timeout_seconds;
        if (!late && (warned || waited < options.patience.warn_seconds)) continue;
        const std::string found = missing_ranks(board.requests, options.missing);
        const std::string text =
            "rank 0 has waited " + std::to_string(static_cast<int>(waited)) + " s in ddl_init: " + found;
        if (!late) {
            options.warn(text);
            warned = true;
            continue;
        }
        return set(&board.verdict, DDL_ERROR_TIMEOUT, text + ". " + kPatienceOfInit);
    }
}

// Rank 0's: do all ask for the same?
void compare(Board& board) {
    const Greeting& first = board.greetings[0];
    for (size_t rank = 1; rank < board.greetings.size(); ++rank) {
        const Greeting& other = board.greetings[rank];
        const std::string both = name(first, 0) + " and " + name(other, rank);
        if (other.version != first.version) {
            return set(&board.verdict, DDL_ERROR_MISMATCH,
                       "ddl_init: " + both + " have different versions of ddl, " + std::to_string(first.version) +
                           " and " + std::to_string(other.version) + ": install one on all hosts");
        }
        if (std::strcmp(other.options, first.options) != 0) {
            return set(&board.verdict, DDL_ERROR_MISMATCH,
                       "ddl_init: " + both + " have different options, '" + first.options + "' and '" + other.options +
                           "': give every rank the same (mpirun -x DDL_OPTIONS)");
        }
        if (other.round != first.round) {
            return set(&board.verdict, DDL_ERROR_MISMATCH,
                       "ddl_init: " + both + " call it for a different time, " + std::to_string(first.round + 1) +
                           " and " + std::to_string(other.round + 1) + ": every rank must call it as often");
        }
    }
}

// From rank 0, which does not wait long for an error to have reached all: a rank that died never takes it.
void broadcast(MPI_Comm base, int rank, void* data, size_t bytes, Board& board, const RendezvousOptions& options) {
    MPI_Request& request = board.requests[0];
    check_mpi(MPI_Ibcast(data, static_cast<int>(bytes), MPI_BYTE, 0, base, &request), "MPI_Ibcast");
    const double start = seconds_now();
    const double most = options.patience.timeout_seconds + kGraceSeconds;
    for (Backoff backoff(0, 1e-3);; backoff.pause()) {
        int finished = 0;
        {
            const MpiCall call;
            check_mpi(MPI_Test(&request, &finished, MPI_STATUS_IGNORE), "MPI_Test");
        }
        if (finished) return;
        const double waited = seconds_now() - start;
        if (waited < kCalmSeconds) continue;
        if (rank == 0 && board.verdict.code != DDL_SUCCESS) return;
        for (size_t other = 0; other < board.greetings.size(); ++other) {
            if (!options.is_dead(static_cast<int>(other))) continue;
            throw Error(DDL_ERROR_PEER_LOST, "ddl_init: rank " + std::to_string(other) + " died during the call");
        }
        if (waited < most) continue;
        if (rank == 0) {
            throw Error(DDL_ERROR_TIMEOUT, "ddl_init: rank 0 has not reached all ranks for " +
                                               std::to_string(static_cast<int>(most)) +
                                               " s: one of them is stopped, or a link to it is down");
        }
        throw Error(DDL_ERROR_TIMEOUT, "ddl_init: no word from rank 0 for " + std::to_string(static_cast<int>(most)) +
                                           " s: it has " + options.missing + ", or the links to it are down");
    }
}

}  // namespace

std::vector<Greeting> call_roll(MPI_Comm base, const Greeting& mine, const RendezvousOptions& options) {
    int rank = 0, size = 0;
    check_mpi(MPI_Comm_rank(base, &rank), "MPI_Comm_rank");
    check_mpi(MPI_Comm_size(base, &size), "MPI_Comm_size");
    auto board = std::make_unique<Board>();
    board->greetings.resize(static_cast<size_t>(size));
    board->requests.assign(static_cast<size_t>(size), MPI_REQUEST_NULL);
    board->greetings[static_cast<size_t>(rank)] = mine;
    try {
        if (rank == 0) {
            gather(base, *board, options);
            if (board->verdict.code == DDL_SUCCESS) compare(*board);
        } else {
            // Blocking, as it is short: MPI sends it at once, or rank 0 has not come.
            const MpiCall call;
            check_mpi(MPI_Send(&mine, sizeof mine, MPI_BYTE, 0, kTag, base), "MPI_Send");
        }
        broadcast(base, rank, &board->verdict, sizeof board->verdict, *board, options);
        if (board->verdict.code != DDL_SUCCESS) {
            throw Error(static_cast<Code>(board->verdict.code), board->verdict.text);
        }
        broadcast(base, rank, board->greetings.data(), sizeof(Greeting) * board->greetings.size(), *board, options);
    } catch (...) {
        static_cast<void>(board.release());
        throw;
    }
    return std::move(board->greetings);
}

std::vector<Greeting> call_roll(Transport& transport, const Greeting& mine, const RendezvousOptions& options) {
    BootstrapOptions talk;
    talk.patience = options.patience;
    talk.warn = options.warn;
    Bootstrap bootstrap(transport, talk);
    Board board;
    board.greetings.resize(static_cast<size_t>(transport.size()));
    board.greetings[static_cast<size_t>(transport.rank())] = mine;
    std::vector<std::byte> verdict, all;
    bootstrap.run([&] {
        if (transport.rank() == 0) {
            for (int rank = 1; rank < transport.size(); ++rank) {
                bootstrap.hear(rank, kTag, &board.greetings[static_cast<size_t>(rank)], sizeof mine);
            }
            compare(board);
            const auto* words = reinterpret_cast<const std::byte*>(&board.verdict);
            verdict.assign(words, words + sizeof board.verdict);
            const auto* first = reinterpret_cast<const std::byte*>(board.greetings.data());
            all.assign(first, first + sizeof mine * board.greetings.size());
        } else {
            bootstrap.say(0, kTag, &mine, sizeof mine);
        }
        bootstrap.broadcast(verdict, kTag + 1, kGraceSeconds);
        bootstrap.broadcast(all, kTag + 3, kGraceSeconds);
    });
    if (verdict.size() != sizeof board.verdict || all.size() != sizeof mine * board.greetings.size()) {
        throw Error(DDL_ERROR_MISMATCH, "ddl_init: rank 0 has another version of ddl: install one on all hosts");
    }
    std::memcpy(&board.verdict, verdict.data(), verdict.size());
    if (board.verdict.code != DDL_SUCCESS) throw Error(static_cast<Code>(board.verdict.code), board.verdict.text);
    std::memcpy(board.greetings.data(), all.data(), all.size());
    return std::move(board.greetings);
}

}  // namespace ddl
