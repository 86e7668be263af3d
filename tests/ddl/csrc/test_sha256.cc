#include "base/sha256.h"
#include "check.h"

using namespace ddl;

namespace {

std::string hex(const Digest& digest) {
    std::string text;
    for (const unsigned char byte : digest) {
        text += "0123456789abcdef"[byte / 16];
        text += "0123456789abcdef"[byte % 16];
    }
    return text;
}

}  // namespace

TEST("SHA-256 gives the digests of FIPS 180-4") {
    CHECK_EQ(hex(sha256("abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    CHECK_EQ(hex(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")),
             "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
}

TEST("HMAC-SHA256 gives the digests of RFC 4231") {
    CHECK_EQ(hex(hmac_sha256(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First")),
             "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
    const Digest digest = hmac_sha256("Jefe", "what do ya want for nothing?");
    CHECK_EQ(hex(digest), "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    CHECK(is_same(digest, digest.data()));
    CHECK(!is_same(digest, sha256("").data()));
}
