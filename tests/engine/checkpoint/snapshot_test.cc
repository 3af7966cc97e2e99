// Copies of a rank's state in memory, and what remains of them after a kill or damage.
#include "engine/checkpoint/snapshot/snapshot.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "engine/model/layout.h"
#include "tandem/error.h"
#include "tandem/random.h"
#include "tests/flat.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;

TrainState state_at(int64_t step) {
  TrainState state;
  state.step = step;
  state.elapsed_s = 1.5 * double(step);
  state.config = "[train]\nsteps = 1\n";
  return state;
}

/// A small model of two replicas; `body` runs on rank 1.
void with_ranks(const std::string& codec,
                const std::function<void(const TrainedRanks& ranks)>& body) {
  WorldOptions world;
  world.ranks = 2;
  run_threads(world, [&](Communicator& comm) {
    ModelConfig config;
    config.hidden = 16, config.layers = 2, config.ffn = 32;
    const auto tp = comm.split(comm.rank(), 0);
    Stage model(*tp, config, {.batch = 1, .seq = 8}, {});
    model.initialize(1);
    ShardedOptimizer optimizer({}, model.parameters(), model.gradients(),
                               {{comm, {0, model.parameters().elements()}, model.parameter_list()}},
                               1 << 10,
                               {.gradients = Wire::parse(codec), .weights = Wire::parse(codec)});
    optimizer.adopt_weights(model.parameters());
    if (comm.rank() == 1) body({comm, "", *tp, {{model, optimizer}}});
    comm.barrier();
  });
}

/// Sets all values of the state to `value`.
void fill(const TrainedRanks& ranks, float value) {
  for (const TrainedStage& stage : ranks.stages) {
    for (const Moment moment : {Moment::weights, Moment::first, Moment::second, Moment::master}) {
      for (const StateSlice& slice : stage.optimizer.slices(moment)) {
        std::ranges::fill(floats(slice.values), value);
      }
    }
    for (const Tensor& residual : stage.optimizer.residuals()) {
      std::ranges::fill(floats(residual), value);
    }
  }
}

/// All values by moment and index in the flat array, residuals after them.
std::vector<std::vector<float>> values_of(const OwnedState& owned) {
  std::vector<std::vector<float>> all;
  for (const Moment moment : {Moment::weights, Moment::first, Moment::second, Moment::master}) {
    std::vector<float>& of_moment = all.emplace_back();
    owned.for_each(0, moment, [&](int64_t begin, const Tensor& values) {
      const auto end = size_t(begin + values.elements());
      of_moment.resize(std::max(of_moment.size(), end), -1);
      std::ranges::copy(floats(values), of_moment.begin() + begin);
    });
  }
  for (const Tensor& residual : owned.residuals()) {
    all.emplace_back(floats(residual).begin(), floats(residual).end());
  }
  return all;
}

/// Whether all values that this rank owns are `value`.
bool all_are(const OwnedState& owned, float value) {
  bool all = true;
  for (const Moment moment : {Moment::weights, Moment::first, Moment::second, Moment::master}) {
    owned.for_each(0, moment, [&](int64_t, const Tensor& values) {
      all &= std::ranges::all_of(floats(values), [value](float x) { return x == value; });
    });
  }
  return all;
}

TEST(Snapshot, HasTheStateOfItsStep) {
  for (const std::string codec : {"none", "int4:g32"}) {
    with_ranks(codec, [&](const TrainedRanks& ranks) {
      size_t next = 0;
      LiveState live(ranks);
      for (const TrainedStage& stage : ranks.stages) {  // different values everywhere
        for (const Moment moment : {Moment::first, Moment::second, Moment::master}) {
          for (const StateSlice& slice : stage.optimizer.slices(moment)) {
            for (float& value : floats(slice.values)) value = normal(3, 4, next++);
          }
        }
        for (const Tensor& residual : stage.optimizer.residuals()) {
          for (float& value : floats(residual)) value = normal(3, 4, next++);
        }
      }
      const auto before = values_of(live);
      SnapshotArea area(-1, 0);
      Snapshot snapshot(ranks, state_at(0), area, {"run", "layout"}, 2);
      EXPECT_EQ(snapshot.generation(0).step(), -1);
      EXPECT_THROW(snapshot.generation(1).verify(), IoError);
      snapshot.generation(1).take(ranks, state_at(7));
      fill(ranks, 0);
      snapshot.generation(0).take(ranks, state_at(8));
      EXPECT_EQ(values_of(snapshot.generation(1)), before);
      EXPECT_NE(values_of(live), before);
      EXPECT_EQ(values_of(snapshot.generation(0)), values_of(live));
      EXPECT_EQ(snapshot.generation(1).step(), 7);
      EXPECT_EQ(snapshot.generation(1).verify(), state_at(7));
      EXPECT_EQ(snapshot.generation(0).verify(), state_at(8));
      EXPECT_EQ(codec == "none", live.residuals().front().elements() == 0);
    });
  }
}

TEST(Snapshot, ChangedBytesAreRefused) {
  with_ranks("int4:g32", [](const TrainedRanks& ranks) {
    const SnapshotLayout layout(ranks);
    const SnapshotShape shape = layout.shape(1, to_text(state_at(1)).size());
    const size_t bytes = shape.generation_bytes();
    SnapshotArea area(-1, 0);
    area.reset({"run", "layout"}, shape);
    std::byte* const memory = area.generation(0);
    SnapshotGeneration generation({}, layout, area, 0);
    fill(ranks, 2);
    generation.take(ranks, state_at(1));
    const std::vector<std::byte> good(memory, memory + bytes);
    int refused = 0, equal = 0;
    for (uint64_t i = 0; i < 120; ++i) {
      const auto words = philox(5, 6, i);
      const size_t begin = i % 4 == 0 ? 0 : 4096;  // header and train state, or values
      const size_t end = i % 4 == 0 ? 600 : bytes;
      const size_t at = begin + words[0] % (end - begin);
      memory[at] ^= std::byte(1 << words[1] % 8);
      try {
        EXPECT_EQ(generation.verify(), state_at(1));
        ++equal;  // unused bytes
        ASSERT_TRUE(all_are(generation, 2));
      } catch (const IoError& error) {
        EXPECT_THAT(error.what(), HasSubstr("in memory: "));
        ++refused;
      }
      std::ranges::copy(good, memory);
    }
    EXPECT_GT(refused, 90);
    EXPECT_EQ(refused + equal, 120);
    EXPECT_THROW(generation.take(ranks, state_at(int64_t{1} << 40)), InvalidArgument);  // no room
  });
}

/// Kills a process that takes snapshots all the time, at any moment: of the two generations in the
/// memory that remains, one is valid and holds its step's values.
void kill_while_taking(int kills) {
  with_ranks("none", [kills](const TrainedRanks& ranks) {
    int torn = 0;
    for (int kill = 0; kill < kills; ++kill) {
      SnapshotArea area(-1, 0);
      Snapshot snapshot(ranks, state_at(0), area, {"run", "layout"}, 2);
      fill(ranks, 1);
      snapshot.generation(0).take(ranks, state_at(1));
      const pid_t child = ::fork();
      if (child == 0) {
        for (int step = 2;; ++step) {
          fill(ranks, float(step));
          snapshot.generation((step - 1) % 2).take(ranks, state_at(step));
        }
      }
      std::this_thread::sleep_for(
          std::chrono::microseconds(100 + philox(8, 1, uint64_t(kill))[0] % 3000));
      ::kill(child, SIGKILL);
      ::waitpid(child, nullptr, 0);
      int valid = 0;
      for (const int index : {0, 1}) {
        const SnapshotGeneration& generation = snapshot.generation(index);
        if (generation.step() < 0) continue;
        ++valid;
        const int64_t step = generation.step();
        ASSERT_EQ(generation.verify(), state_at(step));
        ASSERT_TRUE(all_are(generation, float(step)));
      }
      ASSERT_GE(valid, 1) << "kill " << kill;
      torn += valid == 1;
    }
    EXPECT_GT(torn, kills / 10);  // some kills were in the middle of a copy
  });
}

TEST(Snapshot, OneGenerationIsValidAfterAKill) {
  kill_while_taking(30);
}

TEST(SnapshotLong, OneGenerationIsValidAfterAKill) {
  kill_while_taking(1000);
}

}  // namespace
}  // namespace tandem
