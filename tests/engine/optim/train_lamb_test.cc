// LAMB on sharded tensors against the algorithm on whole ones.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <functional>
#include <map>

#include "core/system/files.h"
#include "engine/data/corpus.h"
#include "engine/model/layout.h"
#include "engine/optim/optimizer.h"
#include "engine/parallel/dims.h"
#include "engine/parallel/sharded/parameter_slices.h"
#include "engine/parallel/sharded/sharded_optimizer.h"
#include "engine/train/trainer.h"
#include "tandem/random.h"
#include "tests/engine/train/known_peak.h"
#include "tests/engine/train/sample_text.h"
#include "tests/engine/train/temp_dir.h"
#include "tests/flat.h"

namespace tandem {
namespace {

constexpr int64_t kSteps = 5;
constexpr double kRate = 0.02;

TrainConfig config() {
  TrainConfig c;
  c.optimizer.weight_decay = 0.3;
  return c;
}

/// Dense layers, experts and norms, and fused matrices whose rows alternate between tensors.
ModelConfig small_model(bool has_experts) {
  ModelConfig model;
  model.vocab = 260;
  model.hidden = 16;
  model.layers = 2;
  model.heads = model.kv_heads = 2;
  model.head_dim = 8;
  model.ffn = 24;
  model.parallel_block = !has_experts;
  if (!has_experts) return model;
  model.experts = 4;
  model.moe_layer_freq = 2;
  model.router_bias_update_rate = 0.01;
  return model;
}

uint64_t stream(const std::string& name) {
  return std::hash<std::string>()(name);
}
float initial_weight(const std::string& name, int64_t element) {
  const float scale = name.find("proj") != std::string::npos ? 0.1f : 1.0f;
  return scale * normal(1, stream(name), uint64_t(element));
}
/// Router biases have no gradient. Scales differ by tensor, which LAMB must undo.
float whole_gradient(const std::string& name, int64_t step, int64_t element) {
  if (name.find("bias") != std::string::npos) return 0;
  const float scale = name.find("mlp") != std::string::npos ? 10.0f : 0.1f;
  return scale * normal(uint64_t(step) + 2, stream(name), uint64_t(element));
}

using Whole = std::map<std::string, std::vector<double>>;

/// Algorithm 2 of arXiv 1904.00962 on whole tensors, in double.
Whole reference(const ModelConfig& model) {
  const auto& o = config().optimizer;
  const ModelLayout layout(model, 1, 0);
  Whole all;
  for (const Parameter& p : layout.parameters) {
    int64_t count = 1;
    for (const int64_t dim : p.shape) count *= dim;
    std::vector<double> w, m(size_t(count), 0.0), v(m), u(m);
    for (int64_t i = 0; i < count; ++i) w.push_back(initial_weight(p.name, i));
    for (int64_t t = 0; t < kSteps; ++t) {
      double weights = 0, directions = 0;
      for (size_t i = 0; i < w.size(); ++i) {
        const double g = whole_gradient(p.name, t, int64_t(i));
        m[i] = o.beta1 * m[i] + (1 - o.beta1) * g;
        v[i] = o.beta2 * v[i] + (1 - o.beta2) * g * g;
        u[i] = m[i] / (1 - std::pow(o.beta1, double(t) + 1)) /
               (std::sqrt(v[i] / (1 - std::pow(o.beta2, double(t) + 1))) + o.eps);
        if (p.decay) u[i] += o.weight_decay * w[i];
        weights += w[i] * w[i], directions += u[i] * u[i];
      }
      const double ratio =
          weights > 0 && directions > 0 ? std::sqrt(weights) / std::sqrt(directions) : 1;
      for (size_t i = 0; i < w.size(); ++i) w[i] -= kRate * ratio * u[i];
    }
    all[p.name] = std::move(w);
  }
  return all;
}

/// Weights of a rank after the steps, in its flat array. Replica r contributes 1 / 3 and 2 / 3 of
/// each gradient, or similar.
std::vector<float> train_rank(const ParallelGroups& groups, const ModelLayout& layout,
                              int64_t bucket, Wire weights_wire) {
  std::vector<Parameter> dense, experts;
  for (const Parameter& p : layout.parameters) {
    (p.sharding.over_ep() ? experts : dense).push_back(p);
  }
  std::vector<float> w(size_t(layout.size)), g(w.size());
  const ParameterSlices slices(layout.parameters);
  const auto for_each_element = [&](const auto& visit) {
    slices.for_each({0, layout.size}, [&](const ParameterSlice& slice) {
      for (int64_t i = 0; i < slice.count; ++i) {
        visit(layout.parameters[slice.parameter], slice.whole + i, size_t(slice.flat + i));
      }
    });
  };
  for_each_element([&](const Parameter& p, int64_t element, size_t at) {
    w[at] = initial_weight(p.name, element);
  });
  std::vector<ParameterGroup> parameter_groups{{groups.copies(), {0, layout.experts_begin}, dense}};
  if (groups.expert_copies()) {
    parameter_groups.push_back({*groups.expert_copies(),
                                {layout.experts_begin, layout.size - layout.experts_begin},
                                experts});
  }
  ShardedOptimizer optimizer({}, flat(w), flat(g), parameter_groups, bucket,
                             {.weights = weights_wire,
                              .optimizer = find_optimizer("lamb"),
                              .norm_axes = groups.world_axes()});
  optimizer.adopt_weights(flat(w));
  const auto weight = [](const Communicator& replicas) {
    const int size = replicas.size();
    return float(replicas.rank() + 1) / float(size * (size + 1) / 2);
  };
  for (int64_t step = 0; step < kSteps; ++step) {
    for_each_element([&](const Parameter& p, int64_t element, size_t at) {
      const float share = weight(p.sharding.over_ep() ? *groups.expert_copies() : groups.copies());
      g[at] = share * whole_gradient(p.name, step, element);
    });
    if (layout.experts_begin < layout.size) {
      optimizer.ready({layout.experts_begin, layout.size - layout.experts_begin});
    }
    optimizer.ready({0, layout.experts_begin});
    optimizer.reduce();
    optimizer.update(AdamStep::make(config().optimizer, step, kRate, 0));
    optimizer.await_all();
  }
  return w;
}

/// Largest difference to `expected` on any rank, relative to the tensor's root mean square.
void expect_near(const ModelLayout& layout, const std::vector<float>& w, const Whole& expected,
                 double bound) {
  ParameterSlices(layout.parameters).for_each({0, layout.size}, [&](const ParameterSlice& slice) {
    const std::string& name = layout.parameters[slice.parameter].name;
    const std::vector<double>& whole = expected.at(name);
    double squares = 0;
    for (const double x : whole) squares += x * x;
    const double size = std::sqrt(squares / double(whole.size()));
    for (int64_t i = 0; i < slice.count; ++i) {
      ASSERT_NEAR(w[size_t(slice.flat + i)], whole[size_t(slice.whole + i)], bound * size) << name;
    }
  });
}

TEST(Lamb, EqualsTheAlgorithmOnWholeTensorsAtEveryLayout) {
  for (const bool has_experts : {false, true}) {
    const ModelConfig model = small_model(has_experts);
    const Whole expected = reference(model);
    for (const ParallelDims& dims :
         {ParallelDims(1, 1), ParallelDims(2, 1), ParallelDims(1, 2), ParallelDims(2, 2),
          ParallelDims(1, 2, 2), ParallelDims(2, 2, 2), ParallelDims(1, 4, 2)}) {
      if (dims.ep() > 1 && !has_experts) continue;
      SCOPED_TRACE(dims.describe());
      WorldOptions options;
      options.ranks = dims.ranks();
      run_threads(options, [&](Communicator& world) {
        const ParallelGroups groups(world, dims, has_experts);
        const int ep_rank = has_experts ? groups.experts()->rank() / dims.tp() : 0;
        const ModelLayout layout(model, dims.tp(), groups.tp().rank(), {dims.ep(), ep_rank});
        for (const int64_t bucket : {700, 1 << 20}) {
          expect_near(layout, train_rank(groups, layout, bucket, {}), expected, 2e-6);
        }
      });
    }
  }
}

// The norms are those of the owners' masters, not of the weights that ranks hold.
TEST(Lamb, MastersAreUpdatedWhereWeightsAreSentEncoded) {
  const ModelConfig model = small_model(false);
  const Whole expected = reference(model);
  WorldOptions options;
  options.ranks = 2;
  run_threads(options, [&](Communicator& world) {
    const ParallelGroups groups(world, ParallelDims(1, 2), false);
    const ModelLayout layout(model, 1, 0);
    expect_near(layout, train_rank(groups, layout, 700, Wire::parse("int8")), expected, 5e-3);
  });
}

TEST(Lamb, RatioIsOneForAZeroNorm) {
  EXPECT_EQ(trust_ratio(0, 4), 1);
  EXPECT_EQ(trust_ratio(4, 0), 1);
  EXPECT_EQ(trust_ratio(9, 4), 1.5);
}

TrainRequest request_for(const char* name, int tp, int dp, int ep, const std::string& out,
                         std::vector<std::string> overrides) {
  for (const char* key : {"train.seq=32", "optimizer.name=lamb", "parallel.strategy=serial"}) {
    overrides.emplace_back(key);
  }
  TrainRequest request;
  request.config =
      load_config(std::string(TANDEM_SOURCE_DIR "/configs/") + name, with_sample_text(overrides));
  request.config.parallel.tp = tp;
  request.config.parallel.dp = dp;
  request.config.parallel.ep = ep;
  request.out = out;
  return request;
}

void run(const TrainRequest& given) {
  const TrainRequest request = with_known_peak(given);
  check_config(request.config);
  const Corpus corpus(request.config.data.paths, request.config.data.val_fraction);
  WorldOptions options;
  options.ranks = int(request.config.parallel.tp * request.config.parallel.dp);
  run_threads(options, [&](Communicator& comm) { train(comm, request, corpus); });
}

TEST(Lamb, ResumedRunHasTheSameBits) {
  const TempDir dir;
  for (const char* name : {"tiny.toml", "moe.toml"}) {
    const int ep = std::string(name) == "moe.toml" ? 2 : 1;
    const std::string out = dir / name;
    const std::vector<std::string> keys{"train.steps=6", "checkpoint.every=3"};
    TrainRequest request = request_for(name, 2, 2, ep, out, keys);
    run(request);
    const std::string whole = read_file(out + "/final/model.safetensors");
    std::filesystem::remove_all(out + "/checkpoints/step-00000006");
    std::filesystem::remove_all(out + "/final");
    request.resume = true;
    run(request);
    EXPECT_EQ(read_file(out + "/final/model.safetensors"), whole) << name;

    const std::string adamw = out + "-adamw";
    TrainRequest other = request_for(name, 2, 2, ep, adamw, keys);
    other.config.optimizer.name = "adamw";
    run(other);
    EXPECT_NE(read_file(adamw + "/final/model.safetensors"), whole) << name;
  }
}

}  // namespace
}  // namespace tandem
