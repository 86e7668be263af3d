#include <chrono>
#include <thread>

#include "check.h"
#include "measure/stream.h"
#include "talk.h"

using namespace ddl;

TEST("a rank that gets its core when all has arrived does not take its partner's link for a fast one") {
    LocalNetwork network(2);
    talk(network, [](Bootstrap& bootstrap) {
        const Box box;
        Stream stream(bootstrap, 1 - bootstrap.rank(), 0, box, 1e-4);
        if (bootstrap.rank() == 0) {
            stream.run();
            return;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(200));
        CHECK(stream.run() < 1e6);  // 32 KiB without an acknowledgement, in the 70 ms in which the other rank sent
    });
}
