// A small test framework: TEST("a sentence") { CHECK(...); CHECK_EQ(a, b); }. A failed check names its place and its
// values, and the test goes on; an exception ends its test.
#pragma once

#include <cstdint>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

namespace check {

struct Test {
    const char* file;
    const char* name;
    std::function<void()> body;
};

std::vector<Test>& tests();

// Thread-safe: ranks are threads.
void failed(const char* file, int line, const std::string& what);

// True in builds with a sanitizer, which are 5 to 20 times slower: sweeps take fewer points there.
constexpr bool kSanitized =
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    true;
#else
    false;
#endif

// Seeds random tests; printed at the start, and set by `ddl_tests --seed N`.
uint64_t seed();

struct Registration {
    Registration(const char* file, const char* name, std::function<void()> body) {
        tests().push_back({file, name, std::move(body)});
    }
};

template <typename T>
std::string show(const T& value) {
    std::ostringstream text;
    if constexpr (std::is_enum_v<T>) {
        text << static_cast<int>(value);
    } else {
        text << value;
    }
    return text.str();
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// The message of the exception of type E that `body` throws; "" if it throws none.
template <typename E>
std::string message_of(const std::function<void()>& body) {
    try {
        body();
    } catch (const E& error) {
        return error.what();
    }
    return "";
}

}  // namespace check

#define CHECK_JOIN_(a, b) a##b
#define CHECK_NAME_(a, b) CHECK_JOIN_(a, b)
#define TEST(name)                                                                                       \
    static void CHECK_NAME_(test_, __LINE__)();                                                          \
    static const check::Registration CHECK_NAME_(registration_, __LINE__)(__FILE__, name,                \
                                                                          CHECK_NAME_(test_, __LINE__)); \
    static void CHECK_NAME_(test_, __LINE__)()
#define CHECK(condition)                                                 \
    do {                                                                 \
        if (!(condition)) check::failed(__FILE__, __LINE__, #condition); \
    } while (false)
#define CHECK_EQ(a, b)                                                                               \
    do {                                                                                             \
        const auto& check_a = (a);                                                                   \
        const auto& check_b = (b);                                                                   \
        if (!(check_a == check_b)) {                                                                 \
            check::failed(__FILE__, __LINE__,                                                        \
                          #a " == " #b ": " + check::show(check_a) + " != " + check::show(check_b)); \
        }                                                                                            \
    } while (false)
#define CHECK_CONTAINS(text, part)                                                                                    \
    do {                                                                                                              \
        const std::string check_text = (text);                                                                        \
        if (!check::contains(check_text, part)) {                                                                     \
            check::failed(__FILE__, __LINE__, std::string("'") + check_text + "' does not contain '" + (part) + "'"); \
        }                                                                                                             \
    } while (false)
