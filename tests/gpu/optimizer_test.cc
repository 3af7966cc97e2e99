// The optimizers on GPU ranks against CPU ranks: their kernels at any alignment, and LAMB's steps
// on tensors that are sharded over replicas.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "comm/exec.h"
#include "engine/optim/optimizer.h"
#include "engine/parallel/sharded/sharded_optimizer.h"
#include "tandem/random.h"
#include "tests/gpu/kernel_operands.h"

namespace tandem::test {
namespace {

class GpuOptimizer : public OnGpus {};

INSTANTIATE_TEST_SUITE_P(Gpu, GpuOptimizer, ::testing::Values(1, 2, 4),
                         [](const auto& test) { return "gpus" + std::to_string(test.param); });

AdamStep some_step() {
  OptimizerConfig config;
  config.weight_decay = 0.3;
  AdamStep step = AdamStep::make(config, 2, 0.02, 0);
  step.gradient_scale = 0.7f;
  return step;
}

/// As `vector`, `start` elements after a multiple of 16 bytes.
Operand placed(Operand operand, int64_t start) {
  operand.alignment.start = start;
  return operand;
}

constexpr int64_t kSizes[] = {1, 3, 4, 255, 1024, 4099, 100001};

// Bounds relative to the largest value: products may be fused with sums, one rounding instead of
// two.
TEST_P(GpuOptimizer, KernelsMatchTheCpu) {
  const AdamStep step = some_step();
  run([&](Communicator& comm) {
    for (const int64_t size : kSizes) {
      for (const int64_t start : {0, 1}) {
        const auto values = [&](const char* name, double low = -1) {
          return placed(vector(name, DType::f32, size, low), start);
        };
        const Operand copy = close(placed(vector("working", DType::bf16, size), start));
        for (const bool decay : {false, true}) {
          for (const DType dtype : {DType::f32, DType::bf16}) {
            expect_equal(comm, "adamw",
                         {close(values("w"), 1), placed(vector("gradient", dtype, size), start),
                          close(values("m"), 1), close(values("v", 0.25)), copy},
                         [&](const Exec& exec, const TensorList& t) {
                           adamw(exec, step, decay, {t[0], t[2], t[3]}, t[1], t[4]);
                         });
          }
          expect_equal(comm, "lamb_direction",
                       {values("w"), close(values("gradient"), 1), close(values("m"), 1),
                        close(values("v", 0.25))},
                       [&](const Exec& exec, const TensorList& t) {
                         lamb_direction(exec, step, decay, {t[0], t[2], t[3]}, t[1]);
                       });
        }
        expect_equal(comm, "lamb_update", {close(values("w"), 1), values("direction"), copy},
                     [](const Exec& exec, const TensorList& t) {
                       lamb_update(exec, 0.3f, t[0], t[1], t[2]);
                     });
        expect_equal(
            comm, "lamb_update without a copy", {close(values("w"), 1), values("direction")},
            [](const Exec& exec, const TensorList& t) { lamb_update(exec, 0.3f, t[0], t[1]); });
      }
    }
  });
}

/// A tensor of the flat array: its properties, and whether its weights or gradients are 0.
struct Case {
  const char* name;
  int64_t size;
  bool decay = true;
  float lr_scale = 1;
  bool zero_weights = false, zero_gradients = false;
};
// With buckets of 500 and 1,000 elements, tensors cross their bounds, and those of ranks' shards.
constexpr Case kCases[] = {
    {"one", 1},
    {"odd", 37},
    {"no_decay", 129, false},
    {"half_rate", 64, true, 0.5f},
    {"frozen", 75, true, 0},
    {"crosses_buckets", 2311},
    {"zero_weights", 301, true, 1, true},
    {"zero_directions", 203, false, 1, false, true},
    {"decay_alone", 90, true, 1, false, true},
    {"all_zero", 11, true, 1, true, true},
    {"last", 999, true, 2},
};
constexpr int64_t kSteps = 4;
constexpr size_t kFirstOfSecondGroup = 5;  // of kCases

std::vector<Parameter> parameters() {
  std::vector<Parameter> list;
  int64_t offset = 0;
  for (const Case& c : kCases) {
    list.push_back({.name = c.name,
                    .shape = {c.size},
                    .sharding = {.count = c.size},
                    .offset = offset,
                    .decay = c.decay,
                    .lr_scale = c.lr_scale});
    offset += c.size;
  }
  return list;
}

/// Flat array of value(case, its number, element).
template <typename Value>
std::vector<float> flat_array(const Value& value) {
  std::vector<float> flat;
  for (size_t i = 0; i < std::size(kCases); ++i) {
    for (int64_t e = 0; e < kCases[i].size; ++e) flat.push_back(value(kCases[i], i, uint64_t(e)));
  }
  return flat;
}

std::vector<float> initial_weights() {
  return flat_array([](const Case& c, size_t i, uint64_t e) {
    return c.zero_weights ? 0.0f : 0.5f * normal(1, i, e);
  });
}

struct Trained {
  std::vector<float> weights;
  std::vector<BFloat16> working;
};

Tensor bytes_of(const void* data, size_t bytes) {
  return Tensor(const_cast<void*>(data), DType::u8, {int64_t(bytes)});
}

/// LAMB's steps on this rank, a replica with its share of each gradient.
Trained train(Communicator& comm, int64_t bucket) {
  const Exec exec = make_exec(comm);
  const std::vector<float> initial = initial_weights();
  const auto count = int64_t(initial.size());
  const size_t bytes = initial.size() * sizeof(float);
  const Memory w(bytes, exec.device), g(bytes, exec.device), copies(bytes / 2, exec.device);
  const Tensor weights = w.view(DType::f32, {count}), gradients = g.view(DType::f32, {count}),
               working = copies.view(DType::bf16, {count});
  const auto load = [&](const std::vector<float>& values, const Memory& memory) {
    copy(exec, bytes_of(values.data(), bytes), all_bytes(memory));
  };
  load(initial, w);
  const std::vector<Parameter> list = parameters();
  const auto second = list.begin() + kFirstOfSecondGroup;
  const int64_t begin = second->offset;
  const std::vector<ParameterGroup> groups{{comm, {0, begin}, {list.begin(), second}},
                                           {comm, {begin, count - begin}, {second, list.end()}}};
  ShardedOptimizer optimizer(exec, {weights, working}, gradients, groups, bucket,
                             {.optimizer = find_optimizer("lamb"), .norm_axes = {&comm}});
  optimizer.adopt_weights(weights);
  OptimizerConfig config;
  config.weight_decay = 0.3;
  const auto share = float(2 * (comm.rank() + 1)) / float(comm.size() * (comm.size() + 1));
  for (int64_t step = 0; step < kSteps; ++step) {
    load(flat_array([&](const Case& c, size_t i, uint64_t e) {
           const float scale = i % 2 == 0 ? 10.0f : 0.1f;
           return c.zero_gradients ? 0.0f : share * scale * normal(uint64_t(step) + 2, i, e);
         }),
         g);
    optimizer.ready({begin, count - begin});
    optimizer.ready({0, begin});
    const Squares squares = optimizer.reduce();
    EXPECT_GT(squares.replicated, 0);
    optimizer.update(AdamStep::make(config, step, 0.02, 0));
    optimizer.await_all();
  }
  Trained trained{std::vector<float>(size_t(count)), std::vector<BFloat16>(size_t(count))};
  copy(exec, all_bytes(w), bytes_of(trained.weights.data(), bytes));
  copy(exec, all_bytes(copies), bytes_of(trained.working.data(), bytes / 2));
  return trained;
}

/// Largest difference of a tensor, relative to its root mean square.
void expect_near(const std::vector<float>& found, const std::vector<float>& expected,
                 double bound) {
  size_t at = 0;
  for (const Case& c : kCases) {
    const std::span all = std::span(expected).subspan(at, size_t(c.size));
    double squares = 0, difference = 0;
    for (size_t i = 0; i < all.size(); ++i) {
      squares += double(all[i]) * double(all[i]);
      const double off = std::abs(double(found[at + i]) - double(all[i]));
      difference = std::max(difference, std::isnan(off) ? HUGE_VAL : off);
    }
    EXPECT_LE(difference, bound * std::sqrt(squares / double(c.size))) << c.name;
    at += size_t(c.size);
  }
}

TEST_P(GpuOptimizer, LambStepsMatchCpuRanksAndRepeatTheirBits) {
  for (const int64_t bucket : {500, 1000, 1 << 20}) {
    SCOPED_TRACE(fmt::format("buckets of {}", bucket));
    std::mutex mutex;
    std::vector<float> expected;
    WorldOptions world;
    world.ranks = ranks();
    run_threads(world, [&](Communicator& comm) {
      Trained trained = train(comm, bucket);
      if (comm.rank() == 0) expected = std::move(trained.weights);
    });
    std::vector<Trained> found;
    for (int repeat = 0; repeat < 2; ++repeat) {
      run(
          [&](Communicator& comm) {
            Trained trained = train(comm, bucket);
            const std::lock_guard lock(mutex);
            found.push_back(std::move(trained));
          },
          60);
    }
    expect_near(found[0].weights, expected, 3e-6);
    for (const Trained& trained : found) {
      EXPECT_EQ(trained.weights, found[0].weights);
      for (size_t i = 0; i < trained.weights.size(); ++i) {
        EXPECT_EQ(trained.working[i].to_float(),
                  BFloat16::from_float(trained.weights[i]).to_float());
      }
    }
    // A norm of 0 gives the ratio 1: weights of 0 move, and directions of 0 move nothing.
    const std::vector<float> initial = initial_weights();
    size_t at = 0;
    for (const Case& c : kCases) {
      const auto begin = found[0].weights.begin() + int64_t(at);
      const bool is_unchanged = std::equal(begin, begin + c.size, initial.begin() + int64_t(at));
      const bool has_no_update =
          c.lr_scale == 0 || (c.zero_gradients && !c.decay) || (c.zero_gradients && c.zero_weights);
      EXPECT_EQ(is_unchanged, has_no_update) << c.name;
      at += size_t(c.size);
    }
  }
}

}  // namespace
}  // namespace tandem::test
