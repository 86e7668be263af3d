// The pinned memory that a device keeps. To make and to free it is slow on a GPU, and waits for it.
#include "check.h"
#include "device/device.h"

using namespace ddl;

namespace {

// Blocks that are never touched.
class CountingDevice final : public Device {
  public:
    ~CountingDevice() override { clear(); }
    Ticket copy(void*, const void*, size_t, bool) override { return 0; }
    bool test(Ticket) override { return true; }
    void finish(Ticket) noexcept override {}

    size_t made = 0, freed = 0, bytes = 0;

  protected:
    std::byte* allocate(size_t size) override {
        bytes = size;
        return reinterpret_cast<std::byte*>(++made * 64);
    }
    void release(std::byte*) noexcept override { ++freed; }
};

void use(CountingDevice& device, size_t bytes, int count) {
    std::vector<Device::Staging> blocks;
    for (int i = 0; i < count; ++i) blocks.push_back(device.take(bytes));
}

}  // namespace

TEST("pinned memory is as large as it is asked for, to an eighth") {
    CountingDevice device;
    for (size_t bytes = 1; bytes < (size_t{1} << 40); bytes = bytes * 5 / 3 + 7) {
        use(device, bytes, 1);
        CHECK(device.bytes >= bytes && device.bytes % 4096 == 0);
        CHECK(device.bytes <= 4096 || device.bytes <= bytes + bytes / 8 + 4096);
    }
}

TEST("pinned memory that is used again is neither made nor freed again, whatever was used before") {
    CountingDevice device;
    for (const size_t mebibytes : {1, 9, 17, 3}) {
        // 16 chunks of four requests, and no more than 1 GiB.
        const int blocks = mebibytes == 17 ? 56 : 64;
        use(device, mebibytes << 20, blocks);
        const size_t made = device.made, freed = device.freed;
        for (int call = 0; call < 3; ++call) use(device, mebibytes << 20, blocks);
        CHECK_EQ(device.made, made);
        CHECK_EQ(device.freed, freed);
    }
}
