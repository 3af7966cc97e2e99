// Documents within sequences: loss and gradients are those of the same documents in sequences of
// their own.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tandem/error.h"
#include "tests/engine/model/harness.h"

namespace tandem {
namespace {
using namespace tandem::test;

constexpr int64_t kSeq = 16;

/// Lengths of the documents in each sequence; the rest of it is padding.
using Rows = std::vector<std::vector<int64_t>>;

struct Text {
  Batch batch;
  std::vector<int32_t> starts;
};

/// Documents of seeded tokens, the same whatever rows they are in. Their order is that of the rows.
Text make_text(const ModelConfig& config, const Rows& rows) {
  const Batch all = make_batch(config, 100);
  Text text;
  size_t next = 0;
  for (const auto& lengths : rows) {
    int64_t position = 0;
    for (const int64_t length : lengths) {
      for (int64_t i = 0; i < length; ++i, ++next) {
        text.batch.tokens.push_back(all.tokens[next]);
        text.batch.targets.push_back(all.targets[next]);
        text.starts.push_back(int32_t(position));
      }
      position += length;
    }
    for (int64_t i = position; i < kSeq; ++i) {
      text.batch.tokens.push_back(-1);
      text.batch.targets.push_back(-1);
      text.starts.push_back(int32_t(position));
    }
  }
  return text;
}

Step run_rows(Communicator& comm, const ModelConfig& config, TransformerOptions options,
              const Rows& rows, bool has_documents) {
  set_kernel_threads(1);
  options.batch = int64_t(rows.size());
  options.seq = kSeq;
  Transformer model(comm, config, options);
  model.initialize(17);
  const HostCopy weights(model.exec(), model.parameters());
  for (float& w : weights.values()) w = w == 1 ? w : w * 5;
  weights.store();
  model.parameters_changed();
  const Text text = make_text(config, rows);
  if (has_documents) model.set_documents(text.starts);
  Step step;
  step.loss = model.forward(text.batch.tokens, text.batch.targets);
  model.backward(.05f);
  collect(model.parameter_list(), HostCopy(model.exec(), model.gradients()).values(),
          step.gradients);
  return step;
}

const Rows kPacked{{5, 1, 6}, {3, 13}, {16}};
const Rows kOnePerRow{{5}, {1}, {6}, {3}, {13}, {16}};

struct DocumentCase {
  const char* name;
  int variant, ranks;
  RecomputedLayers recompute = {};
  int64_t experts = 0;
};

TEST(Documents, InOneSequenceTrainAsInSequencesOfTheirOwn) {
  const DocumentCase cases[] = {{"tied", 0, 1},
                                {"grouped", 1, 2},
                                {"parallel_block", 2, 2},
                                {"windowed", 4, 1},
                                {"selective", 1, 2, {Recompute::selective}},
                                {"full", 0, 2, {Recompute::full}},
                                {"experts", 1, 1, {Recompute::full}, 4}};
  for (const DocumentCase& c : cases) {
    SCOPED_TRACE(c.name);
    ModelConfig config = small_model(kVariants[c.variant]);
    config.experts = c.experts;
    if (c.experts > 0) config.expert_ffn = 16, config.aux_loss_coeff = 0.5;
    TransformerOptions options;
    options.recompute = c.recompute;
    WorldOptions world;
    world.ranks = c.ranks;
    run_threads(world, [&](Communicator& comm) {
      const Step packed = run_rows(comm, config, options, kPacked, true);
      const Step alone = run_rows(comm, config, options, kOnePerRow, false);
      EXPECT_NEAR(packed.loss, alone.loss, 1e-6 * alone.loss);
      EXPECT_LT(difference(packed.gradients, alone.gradients), 2e-6);
      const Step crossing = run_rows(comm, config, options, kPacked, false);
      EXPECT_GT(std::abs(crossing.loss - alone.loss), 1e-4 * alone.loss);
      EXPECT_GT(difference(crossing.gradients, alone.gradients), 1e-2);
    });
  }
}

// Documents of the next microbatch replace those of the last one.
TEST(Documents, AreThoseOfTheLastCall) {
  const ModelConfig config = small_model();
  run_threads({}, [&](Communicator& comm) {
    TransformerOptions options;
    options.batch = 3;
    options.seq = kSeq;
    Transformer model(comm, config, options);
    model.initialize(17);
    const Text text = make_text(config, kPacked);
    const auto loss = [&] { return model.forward(text.batch.tokens, text.batch.targets); };
    const double crossing = loss();
    model.set_documents(text.starts);
    const double masked = loss();
    EXPECT_NE(masked, crossing);
    model.set_documents(std::vector<int32_t>(text.starts.size(), 0));
    EXPECT_EQ(loss(), crossing);
  });
}

TEST(Documents, ThatDoNotDivideASequenceAreRefused) {
  const auto refusal = [](const std::vector<int32_t>& starts) {
    std::string error = "accepted";
    run_threads({}, [&](Communicator& comm) {
      TransformerOptions options;
      options.batch = 2;
      options.seq = 4;
      Transformer model(comm, small_model(), options);
      try {
        model.set_documents(starts);
      } catch (const InvalidArgument& refused) {
        error = refused.what();
      }
    });
    return error;
  };
  EXPECT_EQ(refusal({0, 0, 2, 2, 0, 1, 2, 2}), "accepted");
  EXPECT_EQ(refusal({0, 0, 0}), "documents: 3 values: expected batch x seq = 8");
  EXPECT_EQ(refusal({0, 0, 2, 2, 0, 1, 2, 1}),
            "documents: position 3 of a sequence is of one that begins at 1: expected 2 or 3");
  EXPECT_EQ(refusal({0, 0, 2, 2, 2, 2, 2, 2}),
            "documents: position 0 of a sequence is of one that begins at 2: expected 0 or 0");
}

}  // namespace
}  // namespace tandem
