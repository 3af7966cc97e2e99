#include "engine/checkpoint/checkpoint.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/fs.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <thread>

#include "core/formats/safetensors.h"
#include "engine/checkpoint/run/made_by.h"
#include "engine/checkpoint/run/same_run.h"
#include "engine/train/records/metrics_log.h"
#include "tandem/error.h"
#include "tandem/random.h"
#include "tests/engine/train/temp_dir.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr const char* kFiles[] = {"config.json", "model.safetensors", "optimizer.safetensors",
                                  "state.json"};

std::string write_tensors(const std::string& path, int64_t step, uint64_t stream) {
  SafetensorsWriter writer(path, {{"a", DType::f32, {4, 3}}, {"b", DType::f32, {12}}});
  for (uint64_t tensor = 0; tensor < 2; ++tensor) {
    std::vector<float> values(12);
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = normal(uint64_t(step), stream + tensor, i);
    }
    writer.write(std::as_bytes(std::span(values)));
  }
  return writer.finish();
}

TrainState state_at(int64_t step) {
  return {.step = step,
          .next_sample = step * 8,
          .elapsed_s = 1.5 * double(step),
          .warmup_s = 0.5,
          .control = {90 * step, 10, 1, 2, 3, 0.1, 2.5, 4},
          .seq = 64,
          .seed = 1,
          .data = "data-hash",
          .config = "[train]\nsteps = 1\n",
          .made_by = {}};
}

std::string write_checkpoint(const std::string& out, int64_t step) {
  CheckpointWriter writer(out, step);
  const std::map<std::string, std::string> hashes{
      {"model.safetensors", write_tensors(writer.path("model.safetensors"), step, 0)},
      {"optimizer.safetensors", write_tensors(writer.path("optimizer.safetensors"), step, 9)}};
  writer.complete(state_at(step), ModelConfig{}, hashes);
  writer.commit();
  return list_checkpoints(out).at(0);
}

void fail(const std::string& text) {
  ADD_FAILURE() << text;
}

std::string refusal(const std::string& path) {
  try {
    verify_checkpoint(path);
  } catch (const IoError& error) {
    EXPECT_THAT(error.what(), ::testing::Not(HasSubstr("\n")));
    return error.what();
  }
  return "accepted";
}

TEST(Checkpoint, RoundTrip) {
  const TempDir dir;
  const std::string path = write_checkpoint(dir.path(), 100);
  EXPECT_EQ(path, dir / "checkpoints/step-00000100");
  const Checkpoint checkpoint = verify_checkpoint(path);
  EXPECT_EQ(checkpoint.state, state_at(100));
  EXPECT_EQ(checkpoint.model, ModelConfig{});
}

TEST(Checkpoint, FlippedBytesAndTruncationsAreRefusedByName) {
  const TempDir dir;
  const std::string path = write_checkpoint(dir.path(), 100);
  for (const std::string name : kFiles) {
    const std::string file = path + "/" + name, good = read_file(file);
    for (size_t i = 0; i < good.size(); i += 3) {
      std::string damaged = good;
      damaged[i] = char(damaged[i] ^ (1 << philox(1, 2, i)[0] % 8));
      write_bytes(file, damaged);
      EXPECT_THAT(refusal(path), HasSubstr(file)) << "flip at " << i;
      if (i % 7 != 0) continue;  // and every 21st length
      write_bytes(file, good.substr(0, i));
      EXPECT_THAT(refusal(path), HasSubstr(file)) << "cut at " << i;
    }
    fs::remove(file);
    EXPECT_THAT(refusal(path), HasSubstr(file));
    write_bytes(file, good);
  }
  EXPECT_EQ(refusal(path), "accepted");
}

TEST(Checkpoint, DamagedTensorIsNamed) {
  const TempDir dir;
  const std::string path = write_checkpoint(dir.path(), 100);
  const std::string file = path + "/optimizer.safetensors";
  std::string text = read_file(file);
  text.back() = char(text.back() ^ 1);
  write_bytes(file, text);
  EXPECT_THAT(refusal(path), HasSubstr(file + ": tensor 'b': content hash"));
  write_bytes(file, text.substr(0, text.size() - 1));
  EXPECT_THAT(refusal(path), HasSubstr(file + ": tensor 'b': data_offsets [48, 96)"));
}

TEST(Checkpoint, SwappedTensorsAndFilesAreRefused) {
  const TempDir dir;
  const std::string old = write_checkpoint(dir.path(), 100);
  const std::string path = write_checkpoint(dir.path(), 200);
  for (const std::string name : kFiles) {  // the same file of another step
    if (name == "config.json") continue;   // equal in both
    const std::string good = read_file(path + "/" + name);
    write_bytes(path + "/" + name, read_file(old + "/" + name));
    EXPECT_THAT(refusal(path), HasSubstr(path)) << name;
    write_bytes(path + "/" + name, good);
  }
  const std::string model = read_file(path + "/model.safetensors");
  write_bytes(path + "/model.safetensors", read_file(path + "/optimizer.safetensors"));
  EXPECT_THAT(refusal(path), HasSubstr("model.safetensors: hash"));

  std::string swapped = model;  // the two tensors' bytes exchanged
  std::swap_ranges(swapped.end() - 96, swapped.end() - 48, swapped.end() - 48);
  write_bytes(path + "/model.safetensors", swapped);
  EXPECT_THAT(refusal(path), HasSubstr("tensor 'a': content hash"));

  // Exchanged together with their hashes: consistent, but not what was saved.
  const SafetensorsFile file(path + "/optimizer.safetensors");
  SafetensorsWriter writer(path + "/model.safetensors",
                           {{"a", DType::f32, {4, 3}}, {"b", DType::f32, {12}}});
  writer.write(file.data(*file.find("b")));
  writer.write(file.data(*file.find("a")));
  writer.finish();
  EXPECT_THAT(refusal(path), HasSubstr("model.safetensors: hash"));
}

TEST(Checkpoint, ResumeFallsBackToTheNewestValid) {
  const TempDir dir;
  std::vector<std::string> warnings;
  const auto warn = [&](const std::string& text) { warnings.push_back(text); };
  EXPECT_FALSE(newest_checkpoint(dir.path(), warn).has_value());
  for (const int64_t step : {100, 200, 300}) write_checkpoint(dir.path(), step);
  EXPECT_EQ(newest_checkpoint(dir.path(), warn)->state.step, 300);
  EXPECT_TRUE(warnings.empty());
  write_bytes(dir / "checkpoints/step-00000300/model.safetensors", "garbage");
  fs::remove(dir / "checkpoints/step-00000200/state.json");
  EXPECT_EQ(newest_checkpoint(dir.path(), warn)->state.step, 100);
  ASSERT_EQ(warnings.size(), 2u);
  EXPECT_THAT(warnings[0], HasSubstr("step-00000300/model.safetensors"));
  write_bytes(dir / "checkpoints/step-00000100/config.json", "{}");
  EXPECT_THROW(newest_checkpoint(dir.path(), warn), IoError);
}

TEST(Checkpoint, UncommittedLeavesNothingAndPruneKeepsTheNewest) {
  const TempDir dir;
  for (const int64_t step : {5, 90, 100}) write_checkpoint(dir.path(), step);
  {
    const CheckpointWriter writer(dir.path(), 110);
    write_bytes(writer.path("model.safetensors"), "x");
  }
  EXPECT_EQ(list_checkpoints(dir.path()).size(), 3u);
  fs::create_directories(dir / "checkpoints/.tmp-step-00000042");  // of a killed run
  fs::create_directories(dir / "checkpoints/.old-step-00000041");
  fs::create_directories(dir / "checkpoints/.tmp-mine");
  CheckpointKeeper(dir.path(), 2, fail).saved(dir / "checkpoints/step-00000100", "");
  EXPECT_THAT(names_in(dir / "checkpoints"),
              ElementsAre(".tmp-mine", "step-00000090", "step-00000100"));
}

TEST(Checkpoint, PruneDoesNotCountDamagedOnes) {
  const TempDir dir;
  for (const int64_t step : {1, 2, 3, 4}) write_checkpoint(dir.path(), step);
  write_bytes(dir / "checkpoints/step-00000004/model.safetensors", "damaged");
  std::vector<std::string> warnings;
  CheckpointKeeper keeper(dir.path(), 2, [&](const auto& text) { warnings.push_back(text); });
  keeper.saved(dir / "checkpoints/step-00000004", refusal(dir / "checkpoints/step-00000004"));
  EXPECT_THAT(names_in(dir / "checkpoints"),
              ElementsAre("step-00000002", "step-00000003", "step-00000004"));
  const auto refused = HasSubstr("refused: " + dir.path());
  EXPECT_THAT(warnings, ElementsAre(refused, refused));  // what was to be saved, and what is there
  write_checkpoint(dir.path(), 5);
  keeper.saved(dir / "checkpoints/step-00000005", "");
  EXPECT_THAT(names_in(dir / "checkpoints"),
              ElementsAre("step-00000003", "step-00000004", "step-00000005"));
  EXPECT_EQ(warnings.size(), 2u);  // once is enough
}

TEST(Checkpoint, NothingIsRemovedIfNothingVerifies) {
  const TempDir dir;
  for (const int64_t step : {1, 2, 3}) {
    write_bytes(write_checkpoint(dir.path(), step) + "/model.safetensors", "damaged");
  }
  fs::create_directories(dir / "checkpoints/.was-step-00000009");
  CheckpointKeeper(dir.path(), 1, [](const auto&) {
  }).saved(dir / "checkpoints/step-00000003", "damaged");
  EXPECT_EQ(names_in(dir / "checkpoints").size(), 4u);
}

TEST(Checkpoint, FoldersOfTheUserAreNotTouched) {
  const TempDir dir;
  const std::string parent = dir / "checkpoints/";
  const std::string local = write_checkpoint(dir.path(), 10);
  for (const char* name : {"step-00000010.bak", "step-best", "step-10", "step-00000099"}) {
    fs::copy(local, parent + name);
  }
  fs::create_directories(parent + "step-00000001");  // a valid name, but no run's contents
  write_checkpoint(dir.path(), 11);
  std::vector<std::string> warnings;
  const auto found =
      newest_checkpoint(dir.path(), [&](const auto& text) { warnings.push_back(text); });
  EXPECT_EQ(found->path, parent + "step-00000011");
  EXPECT_THAT(warnings, ElementsAre(HasSubstr("step-00000099/state.json: step 10: expected 99")));
  CheckpointKeeper(dir.path(), 1, [](const auto&) {}).saved(parent + "step-00000011", "");
  EXPECT_THAT(names_in(parent), ElementsAre("step-00000001", "step-00000010.bak", "step-00000011",
                                            "step-00000099", "step-10", "step-best"));
}

TEST(Checkpoint, DanglingLinkIsNamedAndMovedAside) {
  const TempDir dir;
  const std::string parent = dir / "checkpoints/";
  write_checkpoint(dir.path(), 1);
  fs::create_symlink("nowhere", parent + "step-00000002");
  std::vector<std::string> warnings;
  const auto found =
      newest_checkpoint(dir.path(), [&](const auto& text) { warnings.push_back(text); });
  EXPECT_EQ(found->state.step, 1);
  EXPECT_THAT(warnings, ElementsAre(HasSubstr("step-00000002: a link to nothing")));
  write_checkpoint(dir.path(), 2);
  EXPECT_EQ(refusal(parent + "step-00000002"), "accepted");
  EXPECT_THAT(names_in(parent),
              ElementsAre("step-00000001", "step-00000002", "step-00000002.replaced"));
}

TEST(Checkpoint, PipesInPlaceOfFilesAreRefusedAtOnce) {
  const TempDir dir;
  const std::string path = write_checkpoint(dir.path(), 100);
  for (const std::string name : kFiles) {
    const std::string file = path + "/" + name, good = read_file(file);
    fs::remove(file);
    ASSERT_EQ(::mkfifo(file.c_str(), 0600), 0);
    EXPECT_THAT(refusal(path), HasSubstr(file + ": expected a regular file, found a pipe"));
    fs::remove(file);
    write_bytes(file, good);
  }
  ASSERT_EQ(::mkfifo((dir / "metrics.jsonl").c_str(), 0600), 0);
  EXPECT_THROW(MetricsLog(dir / "metrics.jsonl", 1), IoError);
}

TEST(Checkpoint, DeeplyNestedJsonIsRefused) {
  const TempDir dir;
  const std::string path = write_checkpoint(dir.path(), 100);
  const std::string deep = std::string(100'000, '[') + std::string(100'000, ']');
  uint64_t bytes = deep.size();
  std::string tensors(8, '\0');
  for (char& byte : tensors) byte = char(bytes & 0xff), bytes >>= 8;
  for (const std::string name : kFiles) {
    const std::string file = path + "/" + name, good = read_file(file);
    write_bytes(file, name.ends_with(".safetensors") ? tensors + deep : deep);
    EXPECT_THAT(refusal(path), HasSubstr(file)) << name;
    write_bytes(file, good);
  }
  EXPECT_THROW(model_config_from_json(deep, "config.json"), ConfigError);
  write_bytes(dir / "metrics.jsonl", "{\"step\": 1, \"a\": " + deep + "}\n");
  { const MetricsLog log(dir / "metrics.jsonl", 1); }
  EXPECT_EQ(read_file(dir / "metrics.jsonl"), "");
}

TEST(Checkpoint, SavingAgainReplacesADamagedOne) {
  const TempDir dir;
  const std::string path = write_checkpoint(dir.path(), 7);
  write_bytes(path + "/config.json", "{}");
  EXPECT_NE(refusal(path), "accepted");
  write_checkpoint(dir.path(), 7);
  EXPECT_EQ(refusal(path), "accepted");
}

// keep = 1: the only checkpoint is written again and again, by a process that is killed at any
// moment.
TEST(Checkpoint, SavingAgainKeepsAValidCheckpointAtEveryMoment) {
  const TempDir dir;
  write_checkpoint(dir.path(), 5);
  const auto warn = [](const std::string& text) { ADD_FAILURE() << text; };
  for (uint64_t kill = 0; kill < 40; ++kill) {
    const pid_t child = ::fork();
    if (child == 0) {
      while (true) {
        const std::string path = write_checkpoint(dir.path(), 5);
        CheckpointKeeper(dir.path(), 1, [](const auto&) {}).saved(path, "");
      }
    }
    std::this_thread::sleep_for(std::chrono::microseconds(1 + philox(5, 0, kill)[0] % 8000));
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    const auto found = newest_checkpoint(dir.path(), warn);
    ASSERT_TRUE(found.has_value()) << "kill " << kill;
    ASSERT_EQ(found->state, state_at(5));
  }
}

// A file system that cannot exchange names: the process ended between the two renames.
TEST(Checkpoint, InterruptedReplacementIsUndone) {
  const TempDir dir;
  const fs::path path = write_checkpoint(dir.path(), 5);
  fs::rename(path, path.parent_path() / (".was-" + path.filename().string()));
  const auto found = newest_checkpoint(dir.path(), [](const std::string&) {});
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->path, path.string());
}

/// Makes this folder's entries and name immutable, or mutable again; false if not possible.
bool freeze(const std::string& path, bool frozen) {
  if (::geteuid() != 0) return ::chmod(path.c_str(), frozen ? 0555 : 0755) == 0;
  const FileDescriptor folder(path, O_RDONLY | O_DIRECTORY);
  int flags = 0;
  if (::ioctl(folder.get(), FS_IOC_GETFLAGS, &flags) != 0) return false;
  flags = frozen ? flags | FS_IMMUTABLE_FL : flags & ~FS_IMMUTABLE_FL;
  return ::ioctl(folder.get(), FS_IOC_SETFLAGS, &flags) == 0;
}

TEST(Checkpoint, UnremovableCheckpointIsReportedOnceAndKept) {
  const TempDir dir;
  for (const int64_t step : {1, 2, 3}) write_checkpoint(dir.path(), step);
  if (!freeze(dir / "checkpoints", true)) GTEST_SKIP() << "a folder cannot be made read-only here";
  std::vector<std::string> warnings;
  CheckpointKeeper keeper(dir.path(), 1, [&](const auto& text) { warnings.push_back(text); });
  for (int save = 0; save < 2; ++save) {
    EXPECT_NO_THROW(keeper.saved(dir / "checkpoints/step-00000003", ""));
    EXPECT_THAT(warnings, ElementsAre(HasSubstr("step-00000002: cannot rename"),
                                      HasSubstr("step-00000001: cannot rename")));
  }
  ASSERT_TRUE(freeze(dir / "checkpoints", false));
  EXPECT_EQ(list_checkpoints(dir.path()).size(), 3u);
  keeper.saved(dir / "checkpoints/step-00000003", "");
  EXPECT_EQ(list_checkpoints(dir.path()).size(), 1u);
}

TEST(Checkpoint, VerificationByShardsCoversEveryTensor) {
  const TempDir dir;
  const std::string path = write_checkpoint(dir.path(), 100);
  const std::string file = path + "/model.safetensors", good = read_file(file);
  for (const size_t from_end : {1, 60}) {  // tensors b and a, of 48 bytes each
    std::string damaged = good;
    damaged[good.size() - from_end] ^= 1;
    write_bytes(file, damaged);
    for (const int count : {1, 2, 3, 5}) {
      int found = 0;
      for (int index = 0; index < count; ++index) {
        try {
          verify_checkpoint(path, {index, count});
        } catch (const IoError& error) {
          EXPECT_THAT(error.what(), HasSubstr(from_end == 1 ? "'b'" : "'a'"));
          ++found;
        }
      }
      EXPECT_EQ(found, 1) << count;
    }
  }
}

TEST(Checkpoint, RecordsTheBuildThatComputedIt) {
  const TempDir dir;
  TrainState state = state_at(7);
  state.made_by = build_identity();
  EXPECT_TRUE(state.made_by.contains("version") && state.made_by.contains("processor"));
  const std::string file = write_checkpoint(dir.path(), 7) + "/state.json";
  EXPECT_TRUE(read_train_state(checkpoint_path(dir.path(), 7)).made_by.empty());
  {
    CheckpointWriter writer(dir.path(), 8);
    writer.complete(state, ModelConfig{}, {});
    writer.commit();
  }
  EXPECT_EQ(read_train_state(checkpoint_path(dir.path(), 8)).made_by, state.made_by);
  EXPECT_EQ(describe_change(state.made_by, state.made_by), "");
  EXPECT_EQ(describe_change({}, state.made_by), "");
  auto other = state.made_by;
  other["processor"] = "another\x1b[31m";
  EXPECT_THAT(describe_change(other, state.made_by),
              HasSubstr("(processor another?[31m, now " + state.made_by["processor"] + ")"));
}

TEST(Resume, NamesChangedKeysAndTheirConsequences) {
  TrainConfig before;
  before.data.paths = {"a"};
  before.train.dtype = "bf16";
  TrainState state;
  state.step = 6;
  state.elapsed_s = 117;
  state.config = before.to_toml();
  EXPECT_THAT(ResumedRun(before).describe(state), ElementsAre());

  TrainConfig now = before;
  now.data.paths = {"b"};  // the text is compared by its hash
  now.train.dtype = "auto";
  now.trace.enabled = true;
  EXPECT_THAT(ResumedRun(now).describe(state), ElementsAre());
  now.train.batch = 32;
  now.optimizer.beta2 = 0.99;
  now.parallel.strategy = "serial";
  EXPECT_THAT(ResumedRun(now).describe(state),
              ElementsAre("changed since its last checkpoint: train.batch 16 -> 32, "
                          "optimizer.beta2 0.95 -> 0.99, parallel.strategy \"automatic\" -> "
                          "\"serial\""));
  now = before;
  now.train.steps = 6;
  EXPECT_THAT(ResumedRun(now).describe(state),
              ElementsAre("changed since its last checkpoint: train.steps 1000 -> 6; the learning "
                          "rate follows the new schedule from here",
                          "no step is left: it has made 6, train.steps is 6"));
  now.train.seconds = 20;
  EXPECT_THAT(
      ResumedRun(now).describe(state),
      testing::Contains("no step is left: it has trained for 117.0 s, train.seconds is 20"));
  state.config = "[gone]\nkey = 1\n";
  EXPECT_THAT(
      ResumedRun(before).describe(state),
      ElementsAre(testing::HasSubstr("its keys cannot be compared: state.json:1: unknown")));
}

}  // namespace
}  // namespace tandem
