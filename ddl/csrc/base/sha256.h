// SHA-256 (FIPS 180-4) and HMAC (RFC 2104), with which ranks that share a token recognise one another.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <string>

namespace ddl {

using Digest = std::array<unsigned char, 32>;

inline Digest sha256(const std::string& text) {
    static constexpr uint32_t kRounds[64] = {
        0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
        0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
        0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
        0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
        0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
        0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
        0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
        0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
    uint32_t state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                         0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    std::string data = text + '\x80';
    while (data.size() % 64 != 56) data += '\0';
    for (int shift = 56; shift >= 0; shift -= 8) data += static_cast<char>(uint64_t{text.size()} * 8 >> shift);
    const auto turn = [](uint32_t x, int bits) { return x >> bits | x << (32 - bits); };
    for (size_t block = 0; block < data.size(); block += 64) {
        uint32_t w[64];
        for (size_t i = 0; i < 64; ++i) {
            if (i < 16) {
                w[i] = 0;
                for (size_t j = 0; j < 4; ++j) w[i] = w[i] << 8 | static_cast<unsigned char>(data[block + 4 * i + j]);
                continue;
            }
            const uint32_t a = w[i - 15], b = w[i - 2];
            w[i] = w[i - 16] + (turn(a, 7) ^ turn(a, 18) ^ a >> 3) + w[i - 7] + (turn(b, 17) ^ turn(b, 19) ^ b >> 10);
        }
        uint32_t s[8];
        std::memcpy(s, state, sizeof s);
        for (size_t i = 0; i < 64; ++i) {
            const uint32_t first = s[7] + (turn(s[4], 6) ^ turn(s[4], 11) ^ turn(s[4], 25)) +
                                   ((s[4] & s[5]) ^ (~s[4] & s[6])) + kRounds[i] + w[i];
            const uint32_t second =
                (turn(s[0], 2) ^ turn(s[0], 13) ^ turn(s[0], 22)) + ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
            std::memmove(s + 1, s, 7 * sizeof s[0]);
            s[4] += first;
            s[0] = first + second;
        }
        for (size_t i = 0; i < 8; ++i) state[i] += s[i];
    }
    Digest digest;
    for (size_t i = 0; i < digest.size(); ++i) digest[i] = static_cast<unsigned char>(state[i / 4] >> (24 - i % 4 * 8));
    return digest;
}

inline Digest hmac_sha256(std::string key, const std::string& text) {
    if (key.size() > 64) {
        const Digest shorter = sha256(key);
        key.assign(shorter.begin(), shorter.end());
    }
    key.resize(64);
    std::string inner = key, outer = key;
    for (char& c : inner) c = static_cast<char>(c ^ 0x36);
    for (char& c : outer) c = static_cast<char>(c ^ 0x5c);
    const Digest first = sha256(inner + text);
    return sha256(outer + std::string(first.begin(), first.end()));
}

// In constant time, which does not reveal how many bytes are right.
inline bool is_same(const Digest& mine, const unsigned char* theirs) {
    unsigned char difference = 0;
    for (size_t i = 0; i < mine.size(); ++i)
        difference = static_cast<unsigned char>(difference | (mine[i] ^ theirs[i]));
    return difference == 0;
}

}  // namespace ddl
