#include "bench/engine/bench_checkpoint.h"

#include <fcntl.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "core/host_copy.h"
#include "core/random_buffer.h"
#include "core/system/file_descriptor.h"
#include "core/system/files.h"
#include "engine/checkpoint/loading.h"
#include "engine/checkpoint/run/run_checkpoints.h"
#include "engine/config/gpu_training.h"
#include "engine/parallel/collective_check.h"
#include "engine/plan/cost/memory.h"
#include "engine/train/model_ranks.h"
#include "engine/train/run_start.h"
#include "tandem/error.h"

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kBytesOfParameter = 12;  // weight and two moments
constexpr int64_t kBlock = 8 << 20;       // bytes of a write or read

/// Layers of Llama's shape: the widest of which there are four.
ModelConfig sized_model(double bytes) {
  ModelConfig c;
  c.vocab = 256;
  c.head_dim = 64;
  const auto layer_bytes = [](int64_t hidden) {
    return kBytesOfParameter * 16 * double(hidden * hidden);
  };
  c.hidden = 2048;
  while (c.hidden > c.head_dim && 4 * layer_bytes(c.hidden) > bytes) c.hidden /= 2;
  c.layers = std::max<int64_t>(1, std::llround(bytes / layer_bytes(c.hidden)));
  c.heads = c.kv_heads = c.hidden / c.head_dim;
  c.ffn = 4 * c.hidden;
  c.max_seq = 8;
  return c;
}

/// Folder of a benchmark, which rank 0 makes and removes.
class NewFolder {
 public:
  NewFolder(Communicator& world, const std::string& path) : world_(world), path_(path) {
    on_rank_zero(world, "making a folder", [&] {
      if (path_exists(path)) {
        throw IoError(path + ": exists: expected a new folder, which is removed afterwards");
      }
      make_directories(path);
      return std::string();
    });
  }
  ~NewFolder() {
    std::error_code ignored;
    if (world_.rank() == 0) std::filesystem::remove_all(path_, ignored);
  }
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;

 private:
  Communicator& world_;
  const std::string path_;
};

/// Seconds until all ranks have done `work`, which they begin together.
template <typename Work>
double seconds_of(Communicator& world, const Work& work) {
  world.barrier("begin of timed work");
  const auto begin = Clock::now();
  work();
  world.barrier("end of timed work");
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

/// Replaces the moments that this rank holds by random values.
void fill_moments(const TrainedRanks& ranks, uint64_t seed) {
  for (const auto& [model, optimizer] : ranks.stages) {
    for (const Moment moment : {Moment::first, Moment::second}) {
      for (const StateSlice& slice : optimizer.slices(moment, true)) {
        const Memory values = random_buffer(DType::f32, slice.values.elements(), seed++);
        copy(model.exec(), values.view(DType::f32, {slice.values.elements()}), slice.values);
      }
    }
  }
}

std::string digest_of(const TrainedRanks& ranks) {
  std::string hashes;
  const LiveState state(ranks);
  for (size_t stage = 0; stage < ranks.stages.size(); ++stage) {
    for (const Moment moment : kAllMoments) {
      state.for_each(stage, moment, [&](int64_t, const Tensor& values) {
        hashes += content_hash(std::as_bytes(host_values(values)));
      });
    }
  }
  return content_hash(hashes);
}

/// Writes and reads of a rank's share of a checkpoint's bytes.
class RawFile {
 public:
  RawFile(const CheckpointBench& q, uint64_t bytes, int rank)
      : path_(fmt::format("{}/raw-{}", q.folder, rank)),
        blocks_(std::max<int64_t>(1, std::llround(double(bytes) / q.ranks / double(kBlock)))),
        block_(random_buffer(DType::f32, kBlock / int64_t(sizeof(float)), uint64_t(rank))),
        file_(path_, O_RDWR | O_CREAT | O_TRUNC) {}
  ~RawFile() {
    std::error_code ignored;
    std::filesystem::remove(path_, ignored);
  }
  RawFile(const RawFile&) = delete;
  RawFile& operator=(const RawFile&) = delete;

  void write() {
    for (int64_t i = 0; i < blocks_; ++i) {
      write_at(file_.get(), path_, block_.data(), size_t(kBlock), uint64_t(i * kBlock));
    }
    sync_file(file_.get(), path_);
  }
  void read() {
    for (int64_t i = 0; i < blocks_; ++i) {
      read_at(file_.get(), path_, block_.data(), size_t(kBlock), uint64_t(i * kBlock));
    }
  }

 private:
  std::string path_;
  int64_t blocks_;
  Memory block_;
  FileDescriptor file_;
};

/// Times of each repeat, in seconds.
struct Rounds {
  std::vector<double> blocked, copied, saved, loaded, verified, disk_write, disk_read;
};

/// A run's model, optimizer and checkpoints, without its steps.
class SavedModel {
 public:
  SavedModel(Communicator& world, const CheckpointBench& q)
      : world_(world),
        q_(q),
        config_(checkpoint_bench_config(q, world.on_gpu())),
        groups_(world, ParallelDims(config_.parallel), false),
        model_(groups_, config_, {}),
        ranks_{world, describe_layout(config_.parallel, config_.model.layers, groups_.on_gpus()),
               groups_.tp(), stages()},
        memory_(world, {"bench", ranks_.layout, world.rank(), world.size()}) {
    for (ModelChunk& chunk : model_.chunks) {
      chunk.stage.initialize(1);
      chunk.optimizer.adopt_weights(chunk.stage.parameter_staging());
      chunk.stage.end_staging();
    }
    fill_moments(ranks_, 1);
    state_.seq = config_.train.seq;
    state_.config = config_.to_toml();
    checkpoints_.emplace(ranks_,
                         RunCheckpoints::Options{.out = q.folder,
                                                 .model = config_.model,
                                                 .schedule = CheckpointSchedule(config_.checkpoint),
                                                 .memory = &memory_,
                                                 .prepare = [] {}},
                         state_);
  }

  /// Saves the state as a run's thread does while it trains.
  void save(Rounds& rounds) {
    ++state_.step;
    double blocked = 0, copied = 0;
    rounds.saved.push_back(seconds_of(world_, [&] {
      const auto begin = Clock::now();
      checkpoints_->after_step(state_, true, {});
      checkpoints_->before_update();
      for (const TrainedStage& stage : ranks_.stages) wait(stage.model.exec());
      copied = std::chrono::duration<double>(Clock::now() - begin).count();
      blocked = checkpoints_->take_blocked_ms() * 1e-3;
      while (checkpoints_->running().writes) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }));
    rounds.blocked.push_back(largest(blocked));
    rounds.copied.push_back(largest(copied));
    checkpoints_->after_step(state_, false, {});
    if (checkpoints_->saved_step() == state_.step) return;
    throw Error(fmt::format("bench checkpoint: not saved{}", warnings()));
  }

  /// Loads the checkpoint over another state, which must become that of before.
  void load(Rounds& rounds) {
    const std::string saved = digest_of(ranks_), path = checkpoint_path(q_.folder, state_.step);
    fill_moments(ranks_, 1000 + uint64_t(state_.step));
    const bool differed = digest_of(ranks_) != saved;
    rounds.verified.push_back(seconds_of(world_, [&] {
      on_rank_zero(world_, "verifying a checkpoint", [&] { return verify_checkpoint(path).path; });
    }));
    rounds.loaded.push_back(seconds_of(world_, [&] { load_checkpoint(ranks_, path); }));
    for (ModelChunk& chunk : model_.chunks) chunk.stage.end_staging();
    if (differed && digest_of(ranks_) == saved) return;
    throw Error("bench checkpoint: the loaded state differs from the saved one");
  }

  uint64_t bytes() const { return ranks_.bytes(); }
  int64_t parameters() const { return config_.model.parameters(); }

 private:
  std::vector<TrainedStage> stages() {
    std::vector<TrainedStage> all;
    for (ModelChunk& chunk : model_.chunks) all.push_back({chunk.stage, chunk.optimizer});
    return all;
  }
  double largest(double value) {
    for (const auto& blob : world_.exchange(std::as_bytes(std::span(&value, 1)), "times")) {
      double remote = 0;
      std::memcpy(&remote, blob.data(), sizeof remote);
      value = std::max(value, remote);
    }
    return value;
  }
  std::string warnings() {
    std::string text;
    for (const std::string& warning : checkpoints_->take_warnings()) text += ": " + warning;
    return text;
  }

  Communicator& world_;
  const CheckpointBench& q_;
  TrainConfig config_;
  ParallelGroups groups_;
  ModelRanks model_;
  TrainedRanks ranks_;
  SnapshotMemory memory_;
  TrainState state_;
  std::optional<RunCheckpoints> checkpoints_;
};

}  // namespace

TrainConfig checkpoint_bench_config(const CheckpointBench& q, bool on_gpus) {
  TrainConfig config;
  config.model = sized_model(q.gigabytes * 1e9);
  config.train.steps = 1;
  config.train.batch = q.ranks;
  config.train.seq = config.model.max_seq;
  config.train.dtype = on_gpus ? "bf16" : "f32";
  config.parallel.dp = q.ranks;
  config.checkpoint.every_s = 1e9;  // periodic: saved in the background, when it is asked for
  config.data.paths = {"-"};        // none is read
  config.model.check_training(1, 1);
  if (on_gpus) check_gpu_training(config, false);
  MemoryEstimate(config, on_gpus).check();
  return config;
}

CheckpointBenchResult run_checkpoint_bench(Communicator& world, const CheckpointBench& q) {
  const DiskDeadline longer(world);
  const NewFolder folder(world, q.folder);
  SavedModel model(world, q);
  Rounds rounds;
  for (int i = 0; i < q.repeats; ++i) {
    {
      RawFile file(q, model.bytes(), world.rank());
      rounds.disk_write.push_back(seconds_of(world, [&] { file.write(); }));
      rounds.disk_read.push_back(seconds_of(world, [&] { file.read(); }));
    }
    model.save(rounds);
    model.load(rounds);
  }
  return {.bytes = model.bytes(),
          .parameters = model.parameters(),
          .blocked = times_of(rounds.blocked),
          .copied = times_of(rounds.copied),
          .saved = times_of(rounds.saved),
          .loaded = times_of(rounds.loaded),
          .verified = times_of(rounds.verified),
          .disk_write = times_of(rounds.disk_write),
          .disk_read = times_of(rounds.disk_read)};
}

}  // namespace tandem
