// Random damage to the files of a checkpoint: it is refused by name, and the one before is used, or
// it still holds the same state.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "core/formats/safetensors.h"
#include "core/system/files.h"
#include "engine/checkpoint/checkpoint.h"
#include "tandem/error.h"
#include "tandem/random.h"
#include "tests/engine/train/layouts.h"
#include "tests/engine/train/temp_dir.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

/// Numbers of one damage.
class Draw {
 public:
  explicit Draw(uint64_t number) : number_(number) {}
  size_t below(size_t bound) { return size_t(philox(31, number_, next_++)[0]) % bound; }

 private:
  uint64_t number_, next_ = 0;
};

using Files = std::map<std::string, std::string>;

Files read_files(const std::string& folder) {
  Files files;
  for (const std::string& name : names_in(folder)) files[name] = read_file(folder + "/" + name);
  return files;
}

void write_files(const std::string& folder, const Files& files) {
  fs::remove_all(folder);
  fs::create_directories(folder);
  for (const auto& [name, text] : files) write_bytes(folder + "/" + name, text);
}

/// Damages one file of `folder`, which holds `files`; `others`: the same files of another step.
std::string damage(const std::string& folder, const Files& files, const Files& others, Draw& draw) {
  const auto file = std::next(files.begin(), long(draw.below(files.size())));
  const std::string path = folder + "/" + file->first;
  std::string text = file->second;
  const auto range = [&] {
    const size_t begin = draw.below(text.size());
    return std::pair(begin, 1 + draw.below(std::min<size_t>(64, text.size() - begin)));
  };
  const size_t kind = draw.below(12);
  switch (kind) {
    case 0:
    case 1:
    case 2:
      text[draw.below(text.size())] ^= char(1 << draw.below(8));
      break;
    case 3: {
      const auto [begin, count] = range();
      for (size_t i = 0; i < count; ++i) text[begin + i] = char(draw.below(256));
      break;
    }
    case 4: {
      const auto [begin, count] = range();
      std::fill_n(text.begin() + long(begin), count, '\0');
      break;
    }
    case 5:
      text.resize(draw.below(text.size()));
      break;
    case 6:
      text += text.substr(draw.below(text.size()));
      break;
    case 7: {
      const auto [begin, count] = range();
      text.erase(begin, count);
      break;
    }
    case 8: {
      const auto [begin, count] = range();
      text.insert(draw.below(text.size()), text.substr(begin, count));
      break;
    }
    case 9:
      text = std::next(files.begin(), long(draw.below(files.size())))->second;
      break;
    case 10:
      text = others.at(file->first);
      break;
    default:
      fs::remove(path);
      if (draw.below(2) == 0) fs::create_directory(path);
      return file->first + " removed";
  }
  write_bytes(path, text);
  return file->first + " damaged in way " + std::to_string(kind);
}

/// Whether both folders hold the same state.
void expect_equal(const std::string& found, const std::string& expected) {
  const Checkpoint a = verify_checkpoint(found), b = verify_checkpoint(expected);
  EXPECT_EQ(a.state, b.state);
  EXPECT_EQ(a.model, b.model);
  for (const char* name : {"model.safetensors", "optimizer.safetensors", "residuals.safetensors"}) {
    const SafetensorsFile file(found + "/" + name), good(expected + "/" + name);
    ASSERT_EQ(file.entries().size(), good.entries().size());
    for (const SafetensorsEntry& entry : good.entries()) {
      EXPECT_EQ(file.data(file.require(entry.name, entry.shape)), good.data(entry)) << entry.name;
    }
  }
}

void damage_checkpoints(uint64_t cases) {
  const TempDir dir;
  TrainRequest request =
      request_for({1, 2}, dir / "run",
                  {"train.steps=2", "checkpoint.every=1", "model.hidden=16", "model.layers=1",
                   "model.head_dim=4", "model.ffn=32", "model.heads=4", "train.seq=16",
                   "train.batch=2", "parallel.codec=gradients=int4:g32,weights=int8"});
  run_on_threads(request);
  request.config.train.steps = 3;
  request.resume = true;
  run_on_threads(request);
  const std::string good = checkpoint_path(dir / "run", 3),
                    before = checkpoint_path(dir / "run", 2);
  const Files files = read_files(good), others = read_files(before);
  ASSERT_EQ(files.size(), 5u);
  const std::string out = dir / "damaged", path = checkpoint_path(out, 3);
  write_files(checkpoint_path(out, 2), others);
  uint64_t refused = 0, equal = 0;
  for (uint64_t i = 0; i < cases; ++i) {
    Draw draw(i);
    write_files(path, files);
    std::string what = damage(path, files, others, draw);
    if (draw.below(5) == 0) what += ", " + damage(path, files, others, draw);
    SCOPED_TRACE(std::to_string(i) + ": " + what);
    std::string warning;
    const auto found = newest_checkpoint(out, [&](const std::string& text) { warning = text; });
    ASSERT_TRUE(found.has_value());
    if (found->state.step == 3) {
      EXPECT_EQ(warning, "");
      ASSERT_NO_FATAL_FAILURE(expect_equal(path, good));
      ++equal;
    } else {
      EXPECT_EQ(found->state.step, 2);
      EXPECT_THAT(warning, HasSubstr("checkpoint refused: " + path));
      EXPECT_EQ(warning.find('\n'), warning.npos);
      ++refused;
    }
  }
  EXPECT_GE(refused, cases * 9 / 10);
  testing::Test::RecordProperty("equal", std::to_string(equal));
}

TEST(CheckpointDamage, IsRefusedByNameOrHarmless) {
  damage_checkpoints(400);
}

TEST(CheckpointDamageLong, IsRefusedByNameOrHarmless) {
  damage_checkpoints(10000);
}

}  // namespace
}  // namespace tandem
