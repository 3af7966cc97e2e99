// Padding among the rows of a model with experts: loads, auxiliary loss, biases, loss and gradients
// are those of the same documents one after another in a single sequence, which has no padding.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "engine/model/expert_load.h"
#include "tests/engine/model/harness.h"

namespace tandem {
namespace {
using namespace tandem::test;

constexpr int64_t kSeq = 16;

/// A microbatch: the length of the document in each sequence; the rest of it is padding.
using Lengths = std::vector<int64_t>;

struct Text {
  Batch batch;
  std::vector<int32_t> starts;

  /// Documents of seeded tokens, the same wherever they are.
  void add(const ModelConfig& config, uint64_t document, int64_t length) {
    const Batch text = make_batch(config, length, 100 + document);
    starts.insert(starts.end(), size_t(length), position());
    batch.tokens.insert(batch.tokens.end(), text.tokens.begin(), text.tokens.end());
    batch.targets.insert(batch.targets.end(), text.targets.begin(), text.targets.end());
  }
  void pad(int64_t count) {
    starts.insert(starts.end(), size_t(count), position());
    batch.tokens.insert(batch.tokens.end(), size_t(count), -1);
    batch.targets.insert(batch.targets.end(), size_t(count), -1);
  }
  int32_t seq = kSeq;

 private:
  int32_t position() const { return int32_t(starts.size()) % seq; }
};

std::vector<Text> make_padded(const ModelConfig& config, const std::vector<Lengths>& microbatches) {
  std::vector<Text> texts;
  uint64_t document = 0;
  for (const Lengths& lengths : microbatches) {
    Text& text = texts.emplace_back();
    for (const int64_t length : lengths) {
      text.add(config, document++, length);
      text.pad(kSeq - length);
    }
  }
  return texts;
}

std::vector<Text> make_joined(const ModelConfig& config, const std::vector<Lengths>& microbatches) {
  std::vector<Text> texts(1);
  uint64_t document = 0;
  for (const Lengths& lengths : microbatches) {
    texts[0].seq += int32_t(std::accumulate(lengths.begin(), lengths.end(), int64_t(0)));
  }
  texts[0].seq -= int32_t(kSeq);
  for (const Lengths& lengths : microbatches) {
    for (const int64_t length : lengths) texts[0].add(config, document++, length);
  }
  return texts;
}

struct Outcome {
  double loss = 0, aux_loss = 0;
  std::vector<double> counts;
  Tensors gradients;
  Tensors biases;
};

Outcome run_texts(Communicator& comm, const ModelConfig& config, const std::vector<Text>& texts,
                  RecomputedLayers recompute) {
  set_kernel_threads(1);
  TransformerOptions options{.batch = int64_t(texts[0].starts.size()) / texts[0].seq,
                             .seq = texts[0].seq};
  options.recompute = recompute;
  Transformer model(comm, config, options);
  model.initialize(17);
  const HostCopy weights(model.exec(), model.parameters());
  for (float& w : weights.values()) w = w == 1 ? w : w * 5;
  weights.store();
  model.parameters_changed();
  model.begin_step();
  const auto forward = [&](const Text& text) {
    model.set_documents(text.starts);
    return model.forward(text.batch.tokens, text.batch.targets);
  };
  Outcome outcome;
  for (const Text& text : texts) forward(text);
  model.share_load();
  for (const Text& text : texts) {
    outcome.loss += forward(text);
    model.backward(.05f);
  }
  outcome.aux_loss = model.aux_loss();
  outcome.counts = model.expert_counts()->rows;
  collect(model.parameter_list(), HostCopy(model.exec(), model.gradients()).values(),
          outcome.gradients);
  model.adjust_router_bias();
  collect(model.parameter_list(), HostCopy(model.exec(), model.parameters()).values(),
          outcome.biases);
  std::erase_if(outcome.biases,
                [](const auto& tensor) { return !tensor.first.ends_with("correction_bias"); });
  return outcome;
}

struct PaddedModel {
  const char* name;
  void (*change)(ModelConfig&);
  RecomputedLayers recompute = {};
};
const PaddedModel kModels[] = {
    {"two", [](ModelConfig&) {}},
    {"one_shared_alternating",
     [](ModelConfig& c) {
       c.top_k = 1;
       c.normalize_top_k = false;
       c.shared_ffn = 24;
       c.moe_layer_freq = 2;
     }},
    {"all_chosen", [](ModelConfig& c) { c.experts = c.top_k = 4; }, {Recompute::selective}},
    {"sigmoid_bias",
     [](ModelConfig& c) {
       c.router = "sigmoid";
       c.router_bias_update_rate = 0.01;
     },
     {Recompute::full}},
    {"gated_shared", [](ModelConfig& c) {
       c.top_k = 3;
       c.shared_ffn = 24;
       c.shared_expert_gate = c.qkv_bias = true;
     }}};

ModelConfig config_of(const PaddedModel& padded) {
  ModelConfig c = small_model(kVariants[1]);
  c.max_seq = 200;
  c.experts = 8;
  c.top_k = 2;
  c.expert_ffn = 16;
  c.aux_loss_coeff = 0.5;
  padded.change(c);
  return c;
}

/// Two microbatches of three sequences with about this share of padding; now and then one is
/// nothing else.
std::vector<Lengths> make_lengths(int tenths) {
  std::vector<Lengths> microbatches(2);
  for (uint64_t i = 0; i < 6; ++i) {
    const auto length = int64_t(std::lround(double(kSeq) * (1 - 0.1 * tenths)));
    const int64_t more = int64_t(philox(41, uint64_t(tenths), i)[0] % 3) - 1;
    microbatches[i / 3].push_back(tenths == 0 ? kSeq : std::clamp<int64_t>(length + more, 1, kSeq));
  }
  if (tenths % 3 == 2) std::ranges::fill(microbatches[1], 0);
  return microbatches;
}

/// Experts without rows have gradients of zeros.
void expect_close(const Tensors& found, const Tensors& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (const auto& [name, values] : expected) {
    const std::vector<float>& of_name = found.at(name);
    double squares = 0, size = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      squares += std::pow(double(of_name[i]) - double(values[i]), 2);
      size += std::pow(double(values[i]), 2);
    }
    EXPECT_LE(std::sqrt(squares), 1e-5 * std::sqrt(size)) << name;
  }
}

void expect_same(Communicator& comm, const PaddedModel& padded,
                 const std::vector<Lengths>& lengths) {
  const ModelConfig config = config_of(padded);
  const Outcome found = run_texts(comm, config, make_padded(config, lengths), padded.recompute),
                expected = run_texts(comm, config, make_joined(config, lengths), padded.recompute);
  EXPECT_EQ(found.counts, expected.counts);
  EXPECT_EQ(found.biases, expected.biases);
  EXPECT_NEAR(found.loss, expected.loss, 1e-6 * expected.loss);
  EXPECT_NEAR(found.aux_loss, expected.aux_loss, 1e-6 * expected.aux_loss);
  expect_close(found.gradients, expected.gradients);
}

TEST(Padding, TrainsAsIfItWereLeftOut) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  for (int tenths = 0; tenths <= 9; ++tenths) {
    const PaddedModel& padded = kModels[tenths % 5];  // each on one rank and on two
    SCOPED_TRACE(fmt::format("{}, {} % padding", padded.name, 10 * tenths));
    WorldOptions world;
    world.ranks = 1 + tenths % 2;
    run_threads(world,
                [&](Communicator& comm) { expect_same(comm, padded, make_lengths(tenths)); });
  }
}

}  // namespace
}  // namespace tandem
