// Files that all ranks write together, and the offsets of each rank's array in them.
#include "engine/checkpoint/shared_tensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <filesystem>
#include <map>
#include <mutex>
#include <thread>

#include "comm/workspace.h"
#include "core/host_copy.h"
#include "engine/checkpoint/saving.h"
#include "engine/model/initialize.h"
#include "engine/parallel/collective_check.h"
#include "engine/parallel/sharded/parameter_slices.h"
#include "tandem/collectives.h"
#include "tandem/error.h"
#include "tandem/random.h"
#include "tests/engine/train/temp_dir.h"
#include "tests/flat.h"

namespace tandem {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

const SharedTensors::Specs kSpecs{
    {"a", DType::f32, {40, 7}}, {"none", DType::f32, {0, 3}}, {"b", DType::f32, {1}},
    {"c", DType::f32, {301}},   {"d", DType::f32, {9, 9}},
};
const std::map<std::string, std::string> kMetadata{{"format", "pt"}};

std::vector<float> values_of(size_t tensor) {
  int64_t elements = 1;
  for (const int64_t extent : kSpecs[tensor].shape) elements *= extent;
  std::vector<float> values(static_cast<size_t>(elements));
  for (size_t i = 0; i < values.size(); ++i) values[i] = normal(9, tensor, i);
  return values;
}

/// The file as written by one process.
std::string single_file(const std::string& path) {
  SafetensorsWriter writer(path, kSpecs, kMetadata);
  for (size_t i = 0; i < kSpecs.size(); ++i) {
    writer.write(std::as_bytes(std::span<const float>(values_of(i))));
  }
  writer.finish();
  return read_file(path);
}

/// Writes this rank's slices: of every tensor, 11 elements at a time round-robin, the last ones
/// first.
void write_slices(const SharedTensors::Write& write, const Communicator& comm) {
  for (size_t tensor = kSpecs.size(); tensor-- > 0;) {
    const std::vector<float> values = values_of(tensor);
    for (int64_t slice = int64_t(values.size()) / 11; slice >= 0; --slice) {
      if (slice % comm.size() != comm.rank()) continue;
      const int64_t begin = slice * 11,
                    count = std::min<int64_t>(11, int64_t(values.size()) - begin);
      write(tensor, begin, host_tensor(values).narrow(0, begin, count));
    }
  }
}

void on_threads(int ranks, const std::function<void(Communicator&)>& body) {
  WorldOptions world;
  world.ranks = ranks;
  run_threads(world, body);
}

TEST(SharedTensors, MatchTheFileOfOneProcess) {
  const TempDir dir;
  const std::string expected = single_file(dir / "one_writer");
  const std::string hash = SafetensorsFile(dir / "one_writer").header_hash();
  for (const int ranks : {1, 2, 3, 5}) {
    on_threads(ranks, [&](Communicator& comm) {
      const uint64_t before = comm.workspace().bytes_sent;
      SharedTensors file(comm, dir / "shared", kSpecs, kMetadata);
      EXPECT_TRUE(file.ranks_without_path().empty());
      EXPECT_EQ(file.fill([&](const auto& write) { write_slices(write, comm); }), hash);
      EXPECT_EQ(comm.workspace().bytes_sent, before) << "a part went through another rank";
    });
    EXPECT_EQ(read_file(dir / "shared"), expected) << ranks;
    EXPECT_NO_THROW(SafetensorsFile(dir / "shared").verify(true));
  }
}

// Simulates hosts with separate disks: no file of that name, or one that rank 0 has not created.
TEST(SharedTensors, RanksWithAnotherDiskWriteThroughRankZero) {
  const TempDir dir;
  const std::string expected = single_file(dir / "one_writer");
  std::filesystem::create_directories(dir / "other");
  write_bytes(dir / "other/shared", expected);
  on_threads(4, [&](Communicator& comm) {
    const std::string paths[] = {dir / "shared", dir / "none/shared", dir / "shared",
                                 dir / "other/shared"};
    SharedTensors file(comm, paths[comm.rank()], kSpecs, kMetadata);
    EXPECT_THAT(file.ranks_without_path(), ElementsAre(1, 3));
    EXPECT_EQ(file.fill([&](const auto& write) { write_slices(write, comm); }),
              SafetensorsFile(dir / "one_writer").header_hash());
    EXPECT_EQ(file.share().has_value(), comm.rank() % 2 == 0);
  });
  EXPECT_EQ(read_file(dir / "shared"), expected);
  EXPECT_EQ(read_file(dir / "other/shared"), expected);
  EXPECT_FALSE(path_exists(dir / "none"));
}

TEST(SharedTensors, ErrorOnOneRankIsThrownOnAll) {
  const TempDir dir;
  const auto error_of = [&](const std::string& path, const std::function<void()>& change) {
    std::vector<std::string> errors(3);
    std::atomic<int> written{0};
    on_threads(3, [&](Communicator& comm) {
      try {
        SharedTensors file(comm, path, kSpecs, kMetadata);
        file.fill([&](const auto& write) {
          write_slices(write, comm);
          if (++written == 3) change();
          while (written < 3) std::this_thread::yield();
        });
      } catch (const IoError& error) {
        errors[size_t(comm.rank())] = error.what();
      }
    });
    EXPECT_EQ(errors[1], errors[0]);
    EXPECT_EQ(errors[2], errors[0]);
    return errors[0];
  };
  EXPECT_THAT(error_of(dir / "none/x", [] {}), HasSubstr(dir / "none/x: cannot open"));
  EXPECT_THAT(error_of("/dev/full", [] {}), HasSubstr("/dev/full: cannot"));
  EXPECT_THAT(error_of(dir / "gone", [&] { std::filesystem::remove(dir / "gone"); }),
              HasSubstr(dir / "gone"));
  EXPECT_THAT(error_of(dir / "cut", [&] { std::filesystem::resize_file(dir / "cut", 900); }),
              HasSubstr(dir / "cut: ends at byte 900"));
}

// A disk may take longer than the deadline.
TEST(OnEveryRank, WorkMayTakeLongerThanTheDeadline) {
  WorldOptions world;
  world.ranks = 3;
  world.deadline_s = 0.1;
  run_threads(world, [&](Communicator& comm) {
    const auto texts = on_every_rank(comm, "work", kLongWorkBytes + 1, [&] {
      if (comm.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(400));
      return std::to_string(comm.rank());
    });
    EXPECT_THAT(texts, ElementsAre("0", "1", "2"));
    EXPECT_EQ(on_rank_zero(
                  comm, "work",
                  [] {
                    std::this_thread::sleep_for(std::chrono::milliseconds(400));
                    return std::string("done");
                  },
                  kLongWorkBytes + 1),
              "done");
    try {
      on_every_rank(comm, "work", 0, [&]() -> std::string {
        if (comm.rank() == 2) throw ConfigError("a key");
        return "";
      });
      ADD_FAILURE() << "nothing thrown";
    } catch (const ConfigError& error) {
      EXPECT_STREQ(error.what(), "rank 2: a key");
    }
  });
}

/// Whole tensors, assembled from several ranks' arrays.
struct Whole {
  std::vector<float> values;
  std::vector<int> times;
};

// For any division of an array, every element is written once, at its offset.
TEST(ParameterSlices, EveryElementIsPutAtItsOffset) {
  ModelConfig dense, parallel, experts;
  for (ModelConfig* c : {&dense, &parallel, &experts}) {
    c->vocab = 37, c->hidden = 24, c->layers = 2, c->heads = c->kv_heads = 4, c->head_dim = 6;
    c->ffn = 22;
  }
  parallel.parallel_block = true, parallel.tie_word_embeddings = false;
  experts.experts = 4, experts.moe_layer_freq = 2, experts.shared_ffn = 8,
  experts.router_bias_update_rate = 0.1;
  for (const ModelConfig& config : {dense, parallel, experts}) {
    const ModelLayout one(config, 1, 0);
    std::vector<float> expected(size_t(one.size));
    initialize_parameters({}, one, config, 3, flat(expected));
    const int max_ep = config.experts > 0 ? 2 : 1;
    for (const auto& [tp, ep] : {std::pair{1, 1}, {2, 1}, {4, 1}, {1, max_ep}, {2, max_ep}}) {
      for (const int64_t cut : {7, 100, 1 << 30}) {
        std::vector<Whole> whole(one.parameters.size());
        for (int rank = 0; rank < tp * ep; ++rank) {
          const ModelLayout layout(config, tp, rank % tp, {ep, rank / tp});
          std::vector<float> flat(size_t(layout.size));
          initialize_parameters({}, layout, config, 3, tandem::flat(flat));
          for (int64_t begin = 0; begin < layout.size; begin += cut) {
            const FlatRange range{begin, std::min<int64_t>(cut, layout.size - begin)};
            ParameterSlices(layout.parameters).for_each(range, [&](const ParameterSlice& slice) {
              EXPECT_GE(slice.flat, range.begin);
              EXPECT_LE(slice.flat + slice.count, range.begin + range.count);
              Whole& w = whole[slice.parameter];
              w.values.resize(std::max(w.values.size(), size_t(slice.whole + slice.count)));
              w.times.resize(w.values.size());
              for (int64_t i = 0; i < slice.count; ++i) {
                w.values[size_t(slice.whole + i)] = flat[size_t(slice.flat + i)];
                ++w.times[size_t(slice.whole + i)];
              }
            });
          }
        }
        for (size_t i = 0; i < whole.size(); ++i) {
          const Parameter& p = one.parameters[i];
          SCOPED_TRACE(p.name + " tp " + std::to_string(tp) + " ep " + std::to_string(ep));
          const LocalShard slice = local_shard(p);
          ASSERT_EQ(whole[i].values.size(), size_t(slice.rows * slice.columns));
          const int holders = (p.sharding.over_tp() ? 1 : tp) * (p.sharding.over_ep() ? 1 : ep);
          for (int64_t r = 0; r < slice.rows; ++r) {
            for (int64_t c = 0; c < slice.columns; ++c) {
              const auto at = size_t(r * slice.columns + c);
              ASSERT_EQ(whole[i].times[at], holders) << at;
              ASSERT_EQ(whole[i].values[at], expected[size_t(p.offset + r * slice.row_stride + c)])
                  << at;
            }
          }
        }
      }
    }
  }
}

TEST(Saving, NaNWeightsAreNotWritten) {
  const TempDir dir;
  WorldOptions world;
  world.ranks = 2;
  std::atomic<int> refused = 0;
  run_threads(world, [&](Communicator& comm) {
    ModelConfig config;
    config.hidden = 16;
    config.layers = 1;
    config.ffn = 32;
    const auto tp = comm.split(comm.rank(), 0);
    Stage model(*tp, config, {.batch = 1, .seq = 8}, {});
    model.initialize(1);
    ShardedOptimizer optimizer({}, model.parameters(), model.gradients(),
                               {{comm, {0, model.parameters().elements()}, model.parameter_list()}},
                               1 << 20);
    const Parameter& last = model.parameter_list().back();
    if (comm.rank() == 1) floats(model.parameters())[size_t(last.offset) + 2] = std::nanf("");
    const TrainedRanks ranks{comm, "", *tp, {{model, optimizer}}};
    TrainState state;
    state.step = 3;
    try {
      save_final(ranks, LiveState(ranks), dir.path(), state, config, DType::f32);
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(),
                  HasSubstr("after step 3: tensor '" + last.name + "' has nan at element 2"));
      ++refused;
    }
  });
  EXPECT_EQ(refused, 2);
  EXPECT_FALSE(path_exists(dir / "final"));
}

}  // namespace
}  // namespace tandem
