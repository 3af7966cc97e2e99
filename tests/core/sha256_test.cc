// SHA-256 on the examples of FIPS 180-4 and at every length around a block's; HMAC on those of RFC
// 4231.
#include "core/system/sha256.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>
#include <string_view>

namespace tandem::test {
namespace {

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

std::string hex(const Digest& digest) {
  std::string text;
  for (const std::byte b : digest) text += fmt::format("{:02x}", unsigned(b));
  return text;
}

TEST(Sha256, MatchesTheExamplesOfTheStandard) {
  EXPECT_EQ(hex(sha256({})), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hex(sha256(bytes_of("abc"))),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hex(sha256(bytes_of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"))),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(hex(sha256(bytes_of(std::string(1000000, 'a')))),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

// Digest of the digests of 0 to 199 letters, compared with sha256sum's.
TEST(Sha256, EveryLengthAroundABlockMatchesSha256sum) {
  std::string all;
  for (size_t n = 0; n < 200; ++n) all += hex(sha256(bytes_of(std::string(n, 'x')))) + "\n";
  EXPECT_EQ(hex(sha256(bytes_of(all))),
            "eefa31ba9c6db774cb2535a4059ef29c02021837d737e3a51351ffc7fa629899");
}

TEST(HmacSha256, MatchesTheExamplesOfTheRfc) {
  EXPECT_EQ(hex(hmac_sha256(bytes_of(std::string(20, '\x0b')), bytes_of("Hi There"))),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(hex(hmac_sha256(bytes_of("Jefe"), bytes_of("what do ya want for nothing?"))),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(hex(hmac_sha256(bytes_of(std::string(131, '\xaa')),
                            bytes_of("Test Using Larger Than Block-Size Key - Hash Key First"))),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

TEST(EqualInConstantTime, EveryBitCounts) {
  const Digest digest = sha256({});
  EXPECT_TRUE(equal_in_constant_time(digest, digest));
  for (size_t bit = 0; bit < 256; ++bit) {
    Digest other = digest;
    other[bit / 8] ^= std::byte(1 << bit % 8);
    EXPECT_FALSE(equal_in_constant_time(digest, other)) << bit;
  }
}

}  // namespace
}  // namespace tandem::test
