#include "core/formats/safetensors.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <array>
#include <cstring>

#include "core/system/file_descriptor.h"
#include "core/system/files.h"
#include "gemm/gemm.h"
#include "tandem/error.h"
#include "tandem/random.h"
#include "tests/engine/train/temp_dir.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;

std::span<const std::byte> bytes_of(const auto& values) {
  return std::as_bytes(std::span(values));
}

struct Sample {
  std::vector<float> a = std::vector<float>(15), b = std::vector<float>(7);
  std::vector<uint16_t> half = {0x3f80, 0x4000, 0xbf80};
  Sample() {
    for (size_t i = 0; i < a.size(); ++i) a[i] = normal(1, 2, i);
    for (size_t i = 0; i < b.size(); ++i) b[i] = normal(1, 3, i);
  }
  std::string write(const std::string& path) const {
    SafetensorsWriter writer(path,
                             {{"a", DType::f32, {5, 3}},
                              {"empty", DType::f32, {0, 4}},
                              {"half", DType::bf16, {3}},
                              {"b", DType::f32, {7}}},
                             {{"format", "pt"}});
    writer.write(bytes_of(a));
    writer.write({});
    writer.write(bytes_of(half));
    writer.write(bytes_of(b));
    return writer.finish();
  }
};

TEST(Safetensors, RoundTrip) {
  const TempDir dir;
  const Sample sample;
  const std::string hash = sample.write(dir / "x.safetensors");
  const SafetensorsFile file(dir / "x.safetensors");
  EXPECT_EQ(file.header_hash(), hash);
  EXPECT_NO_THROW(file.verify(true));
  EXPECT_EQ(file.metadata().at("format"), "pt");
  std::vector<float> slice(4);
  file.read_f32(*file.find("a"), 11, slice);
  EXPECT_EQ(std::memcmp(slice.data(), sample.a.data() + 11, 16), 0);
  std::vector<float> half(3);
  file.read_f32(*file.find("half"), 0, half);
  EXPECT_EQ(half, (std::vector<float>{1, 2, -1}));
  EXPECT_THROW(file.read_f32(*file.find("a"), 12, slice), InvalidArgument);
  EXPECT_EQ(file.find("c"), nullptr);
  const std::vector<int64_t> shape{3, 5};
  EXPECT_THROW(file.require("a", shape), IoError);
}

bool is_accepted(const std::string& path, const std::string& header_hash) {
  try {
    const SafetensorsFile file(path);
    file.verify(true);
    return file.header_hash() == header_hash;
  } catch (const IoError& error) {
    EXPECT_THAT(error.what(), HasSubstr(path));
    EXPECT_THAT(error.what(), ::testing::Not(HasSubstr("\n")));
    return false;
  }
}

TEST(Safetensors, EveryFlippedByteAndTruncationIsDetected) {
  const TempDir dir;
  const std::string path = dir / "x.safetensors";
  const std::string hash = Sample().write(path);
  const std::string good = read_file(path);
  for (size_t i = 0; i < good.size(); ++i) {
    std::string damaged = good;
    damaged[i] = char(damaged[i] ^ (1 << (i % 8)));
    write_bytes(path, damaged);
    EXPECT_FALSE(is_accepted(path, hash)) << "flip at " << i;
    write_bytes(path, good.substr(0, i));
    EXPECT_FALSE(is_accepted(path, hash)) << "cut at " << i;
  }
  write_bytes(path, good + "x");
  EXPECT_FALSE(is_accepted(path, hash));
}

std::string with_header(const std::string& header, size_t data_bytes) {
  std::string text(8, '\0');
  for (size_t i = 0; i < 8; ++i) text[i] = char(header.size() >> (8 * i));
  return text + header + std::string(data_bytes, 'x');
}

TEST(Safetensors, BadHeadersAreNamed) {
  const struct {
    const char* header;
    size_t bytes;
    const char* message;
  } cases[] = {
      {"[]", 0, "not a JSON object"},
      {"{", 0, "not a JSON object"},
      {R"({"t":1})", 0, "tensor 't': expected an object"},
      {R"({"t":{"dtype":"F32","shape":[2]}})", 8, "data_offsets: expected"},
      {R"({"t":{"dtype":"F99","shape":[2],"data_offsets":[0,8]}})", 8, "dtype F99"},
      {R"({"t":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", 8, "whole number"},
      {R"({"t":{"dtype":"F32","shape":[2.5],"data_offsets":[0,8]}})", 8, "whole number"},
      {R"({"t":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 4, "truncated?"},
      {R"({"t":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", 8, "truncated?"},
      {R"({"t":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", 8, "does not fill"},
      {R"({"t":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,8]}})", 8,
       "too large"},
      {R"({"t":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", 8, "holes"},
      {R"({"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 8, "describes 4"},
      {R"({"__metadata__":{"a":1}})", 0, "expected a string"},
      {R"({"t\n":1})", 0, "tensor 't?'"},
      {R"({"t":{"dtype":"F32","shape":[[2]],"data_offsets":[0,8]}})", 8, "whole number"},
      {R"({"t":{"dtype":"F32","shape":[2],"data_offsets":[0,4,8]}})", 8, "data_offsets: expected"},
      {R"({"t":{"shape":[2],"data_offsets":[0,8]}})", 8, "dtype: expected"},
      {R"({"t":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"x":{}}})", 8, "unknown field x"},
      {R"({"t":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},)"
       R"("t":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})",
       8, "tensor 't': is named twice"},
  };
  for (const auto& c : cases) {
    const std::string text = with_header(c.header, c.bytes);
    try {
      parse_safetensors_header(bytes_of(text), text.size(), "f");
      ADD_FAILURE() << c.header;
    } catch (const IoError& error) {
      EXPECT_THAT(error.what(), HasSubstr(c.message));
    }
  }
}

// A model of many experts has as many: lookup by name must not be linear.
TEST(Safetensors, ManyTensorsAreFoundByName) {
  const TempDir dir;
  constexpr int kTensors = 20'000;
  std::vector<SafetensorsWriter::Spec> specs;
  for (int i = 0; i < kTensors; ++i) specs.push_back({std::to_string(i), DType::f32, {1}});
  SafetensorsWriter writer(dir / "x", specs);
  const float value = 2;
  for (int i = 0; i < kTensors; ++i) writer.write(bytes_of(std::array{value}));
  writer.finish();
  const SafetensorsFile file(dir / "x");
  file.verify(true);
  const std::vector<int64_t> shape{1};
  for (int i = 0; i < kTensors; ++i) {
    ASSERT_EQ(file.require(std::to_string(i), shape).begin, uint64_t(i) * sizeof value);
  }
}

// JSON of as many small values as fit into a header is refused at the first misplaced one.
TEST(Safetensors, HeadersCostNoMoreMemoryThanTheirText) {
  std::string header = R"({"t":{"dtype":"F32","shape":[2],"x":[)";
  for (int i = 0; i < 8'000'000; ++i) header += "[],";
  const std::string text = with_header(header + "0]}}", 0);
  struct rusage before {
  }, after{};
  ::getrusage(RUSAGE_SELF, &before);
  EXPECT_THROW(parse_safetensors_header(bytes_of(text), text.size(), "f"), IoError);
  ::getrusage(RUSAGE_SELF, &after);
  EXPECT_LT(after.ru_maxrss - before.ru_maxrss, 100'000);  // KiB
}

TEST(Safetensors, RandomBytesNeverCrash) {
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    std::string text = with_header(R"({"t":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 8);
    for (uint64_t i = 0; i < 1 + seed % 4; ++i) {
      const auto words = philox(seed, 0, i);
      text[words[0] % text.size()] = char(words[1]);
    }
    try {
      parse_safetensors_header(bytes_of(text), text.size(), "f");
    } catch (const IoError&) {
    }
  }
}

TEST(Safetensors, SeveralThreadsNameTheFirstDamagedTensor) {
  constexpr int kTensors = 18;
  constexpr int64_t kElements = int64_t{1} << 20;  // together more than one thread verifies
  const TempDir dir;
  std::vector<SafetensorsWriter::Spec> specs;
  for (int i = 0; i < kTensors; ++i) specs.push_back({std::to_string(i), DType::f32, {kElements}});
  SafetensorsWriter writer(dir / "x", specs);
  std::vector<float> values(kElements);
  for (int i = 0; i < kTensors; ++i) {
    for (size_t j = 0; j < values.size(); j += 512) values[j] = float(i) + float(j);
    const size_t half = values.size() / 2 * sizeof(float);
    const auto bytes = bytes_of(values);
    writer.write(size_t(i), half, bytes.subspan(half));
    writer.write(size_t(i), 0, bytes.first(half));
    writer.set_hash(size_t(i), content_hash(bytes));
  }
  writer.finish();
  const KernelThreads threads(4);
  EXPECT_NO_THROW(SafetensorsFile(dir / "x").verify(true));
  const FileDescriptor file(dir / "x", O_RDWR);
  for (const size_t damaged : {size_t{13}, size_t{5}}) {
    write_at(file.get(), "x", "damage", 6, writer.tensor_offset(damaged) + 4096);
    try {
      SafetensorsFile(dir / "x").verify(true);
      ADD_FAILURE() << "tensor " << damaged << " passes";
    } catch (const IoError& error) {
      EXPECT_THAT(error.what(),
                  HasSubstr("tensor '" + std::to_string(damaged) + "': content hash"));
    }
  }
}

TEST(Safetensors, WriterChecksSizes) {
  const TempDir dir;
  SafetensorsWriter writer(dir / "x", {{"a", DType::f32, {2}}});
  const std::vector<float> three(3);
  EXPECT_THROW(writer.write(bytes_of(three)), InvalidArgument);
  EXPECT_THROW(writer.finish(), InvalidArgument);
  EXPECT_THROW(SafetensorsFile(dir / "none"), IoError);
}

}  // namespace
}  // namespace tandem
