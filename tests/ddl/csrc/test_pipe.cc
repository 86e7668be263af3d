#include <cstring>
#include <random>
#include <thread>

#include "base/status.h"
#include "check.h"
#include "transport/pipe.h"
#include "transport/shared_memory.h"

using namespace ddl;

namespace {

// Memory of a pipe, and its two ends.
struct Pair {
    explicit Pair(size_t bytes)
        : memory(SharedMemory::create(bytes)), writer(memory->data(), bytes), reader(memory->data(), bytes) {}
    std::unique_ptr<SharedMemory> memory;
    PipeWriter writer;
    PipeReader reader;
};

// The byte of this message at a place: no byte looks like a missing envelope.
std::byte content(size_t number, size_t i) { return static_cast<std::byte>(1 + (number * 31 + i * 7) % 255); }

std::vector<std::byte> payload(size_t number, size_t bytes) {
    std::vector<std::byte> data(bytes);
    for (size_t i = 0; i < bytes; ++i) data[i] = content(number, i);
    return data;
}

bool write(PipeWriter& writer, size_t number, size_t bytes) {
    const auto data = payload(number, bytes);
    const size_t head = bytes / 3;  // 0, too, and either piece across the pipe's end
    return writer.write(static_cast<Tag>(number), {data.data(), head, data.data() + head, bytes - head});
}

std::vector<std::byte> read(const PipeReader& reader, size_t bytes) {
    std::vector<std::byte> data(bytes);
    reader.read([&](size_t offset, const std::byte* piece, size_t its_bytes) {
        CHECK(offset % 16 == 0 && offset + its_bytes <= bytes);
        std::memcpy(data.data() + offset, piece, its_bytes);
    });
    return data;
}

// Takes the next message, which must be there and be this one.
void expect(PipeReader& reader, size_t number, size_t bytes) {
    PipeReader::Message message;
    CHECK(reader.peek(&message));
    CHECK_EQ(message.tag, static_cast<Tag>(number));
    CHECK_EQ(message.bytes, bytes);
    CHECK(message.rides);
    CHECK(read(reader, bytes) == payload(number, bytes));
    reader.drop();
}

}  // namespace

TEST("a pipe gives messages of any length in order, and nothing where there is none") {
    Pair pair(4096);
    PipeReader::Message message;
    CHECK(!pair.reader.peek(&message));
    const size_t lengths[] = {0, 1, 47, 48, 49, 111, 112, 113, 1000, 0, 3};
    size_t number = 0;
    for (const size_t bytes : lengths) CHECK(write(pair.writer, number++, bytes));
    number = 0;
    for (const size_t bytes : lengths) expect(pair.reader, number++, bytes);
    CHECK(!pair.reader.peek(&message));
}

TEST("a pipe goes round its end at every line, with what old messages left there") {
    for (const size_t bytes : {0, 48, 49, 200, 700}) {
        Pair pair(1024);  // 14 lines
        for (size_t number = 0; number < 200; ++number) {
            CHECK(write(pair.writer, number, bytes));
            expect(pair.reader, number, bytes);
            PipeReader::Message message;
            CHECK(!pair.reader.peek(&message));
        }
    }
}

TEST("a full pipe takes nothing until something was taken from it") {
    Pair pair(1024);
    size_t written = 0;
    while (write(pair.writer, written, 100)) ++written;
    CHECK_EQ(written, size_t{6});  // of two lines each, and a line that stays free
    CHECK(pair.writer.announce(77, 1 << 30));
    CHECK(!pair.writer.announce(78, 1 << 30));
    for (size_t number = 0; number < written; ++number) expect(pair.reader, number, 100);
    PipeReader::Message message;
    CHECK(pair.reader.peek(&message));
    CHECK_EQ(message.tag, Tag{77});
    CHECK_EQ(message.bytes, size_t{1 << 30});
    CHECK(!message.rides);
    pair.reader.drop();
    CHECK(!pair.reader.peek(&message));
    const size_t most = PipeMemory::longest_payload(1024);
    CHECK(write(pair.writer, 79, most));
    expect(pair.reader, 79, most);
    CHECK(!write(pair.writer, 80, most + 1));
}

TEST("two threads pass messages of random lengths through a small pipe") {
    Pair pair(2048);
    const size_t count = check::kSanitized ? 5'000 : 50'000;
    const auto lengths = [] { return std::mt19937_64(check::seed()); };
    const auto next = [](std::mt19937_64& random) { return random() % 4 == 0 ? random() % 600 : random() % 64; };
    std::thread writer([&] {
        std::mt19937_64 random = lengths();
        for (size_t number = 0; number < count; ++number) {
            const size_t bytes = next(random);
            if (number % 17 == 0) {
                while (!pair.writer.announce(static_cast<Tag>(number), bytes)) std::this_thread::yield();
            } else {
                while (!write(pair.writer, number, bytes)) std::this_thread::yield();
            }
        }
    });
    std::mt19937_64 random = lengths();
    size_t wrong = 0;
    for (size_t number = 0; number < count; ++number) {
        const size_t bytes = next(random);
        PipeReader::Message message;
        while (!pair.reader.peek(&message)) std::this_thread::yield();
        wrong += message.tag != number || message.bytes != bytes || message.rides == (number % 17 == 0);
        if (message.rides && message.bytes == bytes) wrong += read(pair.reader, bytes) != payload(number, bytes);
        pair.reader.drop();
    }
    writer.join();
    CHECK_EQ(wrong, size_t{0});
}
