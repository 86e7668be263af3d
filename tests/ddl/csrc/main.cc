// ddl_tests [--seed N] [--ranks N] [--part K/N] [WORD]: runs the tests whose file or name contains WORD; of those every
// Nth, from the Kth on. Exit status 1 if one failed, or there was none.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <random>

#include "check.h"

namespace check {
namespace {

std::mutex mutex;
int failures = 0;
uint64_t the_seed = 0;
int the_ranks = 0;

}  // namespace

std::vector<Test>& tests() {
    static std::vector<Test> all;
    return all;
}

void failed(const char* file, int line, const std::string& what) {
    constexpr int kShown = 20;
    const std::lock_guard lock(mutex);
    if (++failures <= kShown) std::printf("%s:%d: %s\n", file, line, what.c_str());
}

uint64_t seed() { return the_seed; }

int ranks() { return the_ranks; }

}  // namespace check

int main(int argc, char** argv) {
    check::the_seed = std::random_device{}();
    const char* word = "";
    int part = 1, parts = 1;
    for (int i = 1; i < argc; ++i) {
        if (std::strcmp(argv[i], "--seed") == 0 && i + 1 < argc) {
            check::the_seed = std::strtoull(argv[++i], nullptr, 10);
        } else if (std::strcmp(argv[i], "--ranks") == 0 && i + 1 < argc) {
            check::the_ranks = std::atoi(argv[++i]);
        } else if (std::strcmp(argv[i], "--part") == 0 && i + 1 < argc) {
            if (std::sscanf(argv[++i], "%d/%d", &part, &parts) != 2 || part < 1 || part > parts) {
                std::fprintf(stderr, "--part %s: expected K/N, from 1/N to N/N\n", argv[i]);
                return EXIT_FAILURE;
            }
        } else {
            word = argv[i];
        }
    }
    std::printf("seed %llu\n", static_cast<unsigned long long>(check::the_seed));
    int found = 0, ran = 0, bad = 0;
    for (const check::Test& test : check::tests()) {
        if (!check::contains(test.file, word) && !check::contains(test.name, word)) continue;
        if (found++ % parts != part - 1) continue;
        const int before = check::failures;
        const auto begin = std::chrono::steady_clock::now();
        try {
            test.body();
        } catch (const std::exception& error) {
            check::failed(test.file, 0, std::string("exception: ") + error.what());
        }
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
        const bool good = check::failures == before;
        std::printf("%s %s (%.2f s)\n", good ? "ok  " : "FAIL", test.name, took.count());
        std::fflush(stdout);
        ++ran;
        bad += !good;
    }
    std::printf("%d tests, %d failed\n", ran, bad);
    return bad == 0 && ran > 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
