// Bugs of context parallelism, planted in otherwise correct steps of two data-parallel and two
// context-parallel ranks: the check finds each, and names what it changes and the axis.
#include <gtest/gtest.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "engine/check/layout_check.h"
#include "engine/parallel/dims.h"
#include "generated_layouts.h"
#include "overlap/attention/operator.h"
#include "planted_changes.h"

namespace tandem {
namespace {

TrainConfig context_config(bool has_documents) {
  TrainConfig config = tiny_config(false);
  config.parallel.dp = config.parallel.cp = 2;
  config.data.document_mask = has_documents;
  check_config(config);
  return config;
}

void run_forward(ContextOperator& attention, const ContextForward& c, const AttentionMask& mask) {
  attention.forward(c.q, c.k, c.v, c.out, c.log_sums, mask);
}
void run_backward(ContextOperator& attention, const ContextBackward& c, const Tensor& dout,
                  const Tensor& dk, const AttentionMask& mask) {
  attention.backward(c.q, c.k, c.v, c.out, c.log_sums, dout, c.dq, dk, c.dv, mask);
}

/// Rotates rows so that they are as rotated by their index after a rotation by their position.
void restart_positions(const Tensor& x, const schedule::ContextRows& rows) {
  const ModelConfig model = tiny_config(false).model;
  const int64_t half = model.head_dim / 2;
  for (int64_t row = 0; row < x.dim(0); ++row) {
    const int64_t index = row % rows.count();
    auto* const values = x.rows(row, 1).as<float>();
    for (int64_t i = 0; i < x.dim(1); ++i) {
      const int64_t pair = i % model.head_dim;
      if (pair >= half) continue;
      const double angle = double(index - rows.position(index)) *
                           std::pow(model.rope_theta, -double(pair) / double(half));
      const double first = values[i], second = values[i + half];
      values[i] = float(first * std::cos(angle) - second * std::sin(angle));
      values[i + half] = float(second * std::cos(angle) + first * std::sin(angle));
    }
  }
}

/// Starts without those at the begin of a chunk.
std::vector<int32_t> join_documents(const Tensor& starts) {
  const int64_t seq = tiny_config(false).train.seq, chunk = seq / 4;
  std::vector<int32_t> joined;
  for (int64_t i = 0; i < starts.elements(); ++i) {
    const int32_t start = starts.as<int32_t>()[i];
    const bool is_joined = start > 0 && start % chunk == 0;
    const int64_t before = i - i % seq + start - 1;
    joined.push_back(is_joined ? joined[size_t(before)] : start);
  }
  return joined;
}

/// Ranks rotate queries and keys by their row on the rank, not by their position.
StepHooks restarted_positions() {
  StepHooks hooks;
  hooks.context_passes.forward = [](ContextOperator& attention, const ContextForward& c) {
    for (const Tensor* x : {&c.q, &c.k}) restart_positions(*x, attention.query_rows());
    run_forward(attention, c, c.mask);
  };
  return hooks;
}

/// A rank has the key gradients of its own queries only.
StepHooks local_key_gradients() {
  StepHooks hooks;
  hooks.context_passes.backward = [](ContextOperator& attention, const ContextBackward& c) {
    const auto make = [](const Tensor& like) {
      return std::vector<float>(size_t(like.elements()));
    };
    std::vector<float> zeros = make(c.dout), dk = make(c.dk), local_dk = make(c.dk);
    const Tensor none = Tensor::of(std::span(zeros), {c.dout.dim(0), c.dout.dim(1)}),
                 of_rank = Tensor::of(std::span(dk), {c.dk.dim(0), c.dk.dim(1)});
    const bool is_first = attention.query_rows().head.begin == 0;
    for (const bool first : {false, true}) {  // whose gradients are not zero
      run_backward(attention, c, first == is_first ? c.dout : none, of_rank, c.mask);
      if (first == is_first) local_dk = dk;
    }
    run_backward(attention, c, c.dout, of_rank, c.mask);
    for (int64_t row = 0; row < c.dk.dim(0); ++row) {
      std::copy_n(local_dk.begin() + row * c.dk.dim(1), c.dk.dim(1), c.dk.rows(row, 1).as<float>());
    }
  };
  return hooks;
}

/// A document that begins where a chunk does is attended as the end of the one before.
StepHooks joined_documents() {
  StepHooks hooks;
  const auto with_mask = [](const AttentionMask& mask, const auto& run) {
    const std::vector<int32_t> joined = join_documents(mask.document_starts);
    run(AttentionMask(mask.window,
                      Tensor::of(std::span(joined), {1, mask.document_starts.elements()})));
  };
  hooks.context_passes.forward = [with_mask](ContextOperator& attention, const ContextForward& c) {
    with_mask(c.mask, [&](const AttentionMask& mask) { run_forward(attention, c, mask); });
  };
  hooks.context_passes.backward = [with_mask](ContextOperator& attention,
                                              const ContextBackward& c) {
    with_mask(c.mask,
              [&](const AttentionMask& mask) { run_backward(attention, c, c.dout, c.dk, mask); });
  };
  return hooks;
}

/// The rows of the tail chunk are before those of the head.
StepHooks swapped_chunks() {
  StepHooks hooks;
  hooks.context_passes.forward = [](ContextOperator& attention, const ContextForward& c) {
    run_forward(attention, c, c.mask);
    const schedule::ContextRows rows = attention.query_rows();
    for (int64_t row = 0; row < c.out.dim(0); row += rows.count()) {
      for (int64_t i = 0; i < rows.head.count; ++i) {
        auto* const head = c.out.rows(row + i, 1).as<float>();
        std::swap_ranges(head, head + c.out.dim(1),
                         c.out.rows(row + rows.head.count + i, 1).as<float>());
      }
    }
  };
  return hooks;
}

/// Loss and gradients divided by the targets of a context-parallel rank.
void divide_by_local_targets(RankStep& step) {
  const auto cp = float(step.groups.dims().cp());
  step.loss *= cp;
  scale_gradients(step, "", cp);
}

float share_of_rank(const RankStep& step) {
  return 1 / float(step.groups.dims().cp());
}

std::string norms() {
  const char* const half = ".weight (0.5 x)";
  return fmt::format(
      "gradient of model.layers.*.input_layernorm{0}, gradient of "
      "model.layers.*.post_attention_layernorm{0}, gradient of model.norm{0}",
      half);
}
/// Gradients that the last layer's keys change: theirs, and those of the layers before.
std::string keys_and_below() {
  std::string text =
      "grad_norm, gradient of model.embed_tokens.weight, gradient of "
      "model.layers.*.input_layernorm.weight, gradient of model.layers.*.self_attn.k_proj.weight";
  for (int layer = 0; layer < 3; ++layer) {
    for (const char* name :
         {"mlp.down_proj", "mlp.gate_proj", "mlp.up_proj", "post_attention_layernorm",
          "self_attn.o_proj", "self_attn.q_proj", "self_attn.v_proj"}) {
      text += fmt::format(", gradient of model.layers.{}.{}.weight", layer, name);
    }
  }
  return text;
}

struct PlantedBug {
  const char* name;
  StepHooks hooks;
  std::string message;  ///< describe_differences
  bool has_documents = false;
};

std::vector<PlantedBug> context_bugs() {
  const std::string all = "all numbers, all gradients";
  return {
      {"loss divided by local targets", after_passes(divide_by_local_targets),
       "loss (2 x), all gradients (2 x)"},
      {"loss of one rank's rows", after_passes([](RankStep& step) {
         if (step.groups.cp() && step.groups.cp()->rank() > 0) step.loss = 0;
       }),
       "loss (0.5013 x)"},
      {"norm gradients averaged", scaled("norm", share_of_rank), norms()},
      {"positions restarted on every rank", restarted_positions(), "grad_norm, all gradients"},
      {"key gradients not summed", local_key_gradients(), keys_and_below()},
      {"documents joined at chunk borders", joined_documents(), all, true},
      {"rows in the order of chunks", swapped_chunks(), all},
  };
}

TEST(PlantedBugs, OfContextParallelismAreFoundAndNamed) {
  for (const bool has_documents : {false, true}) {
    const TrainConfig config = context_config(has_documents);
    const StepsOutcome expected = run_one_rank(config, corpus_of(config));
    const LayoutCheck correct = check_layout(config, corpus_of(config), expected);
    EXPECT_TRUE(correct.ok()) << describe_differences(correct);
    for (const PlantedBug& bug : context_bugs()) {
      if (bug.has_documents != has_documents) continue;
      SCOPED_TRACE(bug.name);
      const LayoutCheck check = check_layout(config, corpus_of(config), expected, bug.hooks);
      EXPECT_FALSE(check.ok());
      EXPECT_EQ(describe_differences(check), bug.message);
      EXPECT_EQ(check.axis, "cp");
    }
  }
}

}  // namespace
}  // namespace tandem
