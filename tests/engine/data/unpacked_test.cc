#include "engine/data/text/unpacked.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/data/data_file.h"
#include "packed_fixtures.h"
#include "tandem/error.h"
#include "tests/engine/data/open_configured.h"
#include "tests/error_of.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;

TEST(Unpacked, DamageIsNamedWithTheFileAndTheByte) {
  const std::string text = make_text(4, 40'000);
  int cases = 0;
  for (const auto& [name, packed] :
       {std::pair{"a.txt.gz", gzip(text)}, {"a.txt.zst", zstd(text)}}) {
    const TempDir dir;
    const auto expect_damage = [&](const std::string& content, const char* how) {
      write_bytes(dir / name, content);
      for (const char* order : {"shuffle", "stream"}) {
        TrainConfig config;
        config.data.paths = {dir / name};
        config.data.order = order;
        const std::string error = error_of([&] {
          const auto source = open_configured(config);
          std::vector<int32_t> all(text.size() + 10);
          source->read(0, all);
        });
        EXPECT_THAT(error, HasSubstr(dir / name + ": damaged ")) << how;
        EXPECT_THAT(error, HasSubstr(": byte ")) << how;
        ++cases;
      }
    };
    for (size_t i = 1; i < 12; ++i) {
      expect_damage(packed.substr(0, packed.size() * i / 12), "cut");
    }
    for (const size_t left : {1, 4, 8})
      expect_damage(packed.substr(0, packed.size() - left), "cut");
    expect_damage(packed + "trailing garbage", "garbage");
    std::string bad_checksum = packed;
    bad_checksum[packed.size() - (name == std::string("a.txt.gz") ? 6 : 2)] ^= 1;
    expect_damage(bad_checksum, "checksum");
  }
  EXPECT_EQ(cases, 2 * 2 * 16);
}

TEST(Unpacked, UnpackingReadsOnlyAsFarAsIsAsked) {
  const TempDir dir;
  std::string packed = gzip(make_text(4, 2'000'000));
  packed.resize(packed.size() - 100);  // found when it is reached
  write_bytes(dir / "a.txt.gz", packed);
  const DataFile file(dir / "a.txt.gz", false, Content::unpacked);
  EXPECT_EQ(file.reach(1000), 1000u);
  EXPECT_THROW(file.size(), IoError);
}

}  // namespace
}  // namespace tandem
