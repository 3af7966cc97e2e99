// Codecs at each site of the forward pass: their effect on the loss, the bytes sent, and refused
// settings.
#include <gtest/gtest.h>

#include <cmath>
#include <mutex>

#include "comm/workspace.h"
#include "engine/plan/codecs/codec_search.h"
#include "tandem/error.h"
#include "tests/engine/model/harness.h"
#include "tests/flat.h"

namespace tandem {
namespace {
using namespace tandem::test;

/// Rows of whole groups of codes, so that a codec's bytes are exactly its bits.
ModelConfig wide_model(bool with_experts) {
  ModelConfig c = small_model();
  c.hidden = 128;
  c.head_dim = 32;
  c.ffn = 64;
  if (with_experts) {
    c.experts = 4;
    c.top_k = 2;
    c.expert_ffn = 32;
    c.moe_layer_freq = 2;
  }
  return c;
}

struct Sent {
  double loss = 0;
  uint64_t bytes = 0;  ///< by all ranks
  Tensors gradients;   ///< of this rank
  bool operator==(const Sent&) const = default;
};

Sent step_of(Communicator& comm, const ModelConfig& config, const CodecPolicy& codec,
             DType dtype = DType::f32) {
  set_kernel_threads(1);
  TransformerOptions options{.batch = 2, .seq = 16, .dtype = dtype};
  options.overlap.strategy = Strategy::serial;
  options.codec = codec;
  Transformer model(comm, config, options);
  model.initialize(17);
  for (float& w : floats(model.parameters())) w = w == 1 ? w : w * 5;
  model.parameters_changed();
  const Batch batch = make_batch(config, 32);
  Sent sent;
  const uint64_t before = comm.workspace().bytes_sent;
  sent.loss = model.forward(batch.tokens, batch.targets);
  const uint64_t local = comm.workspace().bytes_sent - before;
  for (const auto& blob : comm.exchange(std::as_bytes(std::span(&local, 1)), "bytes")) {
    sent.bytes += *reinterpret_cast<const uint64_t*>(blob.data());
  }
  model.backward(1.0f / 32);
  collect(model.parameter_list(), floats(model.gradients()), sent.gradients);
  return sent;
}

void on_ranks(const std::function<void(Communicator&)>& body) {
  if (launched_by_mpi()) return run_mpi({}, body);
  for (const int ranks : {2, 4}) {
    WorldOptions world;
    world.ranks = ranks;
    run_threads(world, body);
  }
}

CodecPolicy at(const CodecSite& site, const char* wire) {
  CodecPolicy policy;
  for (Wire CodecPolicy::*member : site.wires) policy.*member = Wire::parse(wire);
  return policy;
}

TEST(CodecSites, EachSiteChangesTheLossExceptWithLossless) {
  for (const bool with_experts : {false, true}) {
    const ModelConfig config = wide_model(with_experts);
    on_ranks([&](Communicator& comm) {
      for (const DType dtype : {DType::f32, DType::bf16}) {
        const Sent uncompressed = step_of(comm, config, {}, dtype);
        const auto sites = codec_sites(config);
        EXPECT_EQ(sites.size(), with_experts ? 4u : 3u);
        for (const CodecSite& site : sites) {
          SCOPED_TRACE(site.name);
          const Sent exact = step_of(comm, config, at(site, "lossless"), dtype);
          EXPECT_EQ(exact.loss, uncompressed.loss);
          EXPECT_EQ(exact.gradients, uncompressed.gradients);
          const Sent coarse = step_of(comm, config, at(site, "int4:g32"), dtype);
          EXPECT_NE(coarse.loss, uncompressed.loss);
          EXPECT_NEAR(coarse.loss, uncompressed.loss, 0.1 * uncompressed.loss);
          EXPECT_LT(difference(coarse.gradients, uncompressed.gradients), 0.5);
          const Sent fine = step_of(comm, config, at(site, "int8:g32"), dtype);
          EXPECT_LT(std::fabs(fine.loss - uncompressed.loss), 0.01 * uncompressed.loss);
        }
        const CodecPolicy everywhere =
            codec_at(config, site_names(config), Wire::parse("lossless"));
        EXPECT_EQ(step_of(comm, config, everywhere, dtype),
                  step_of(comm, config, everywhere, dtype));
        EXPECT_EQ(step_of(comm, config, everywhere, dtype).loss, uncompressed.loss);
      }
    });
  }
}

// Difference between two formats, so that uncompressed traffic cancels out.
TEST(CodecSites, BytesSentMatchTheSearchsCount) {
  for (const bool with_experts : {false, true}) {
    const ModelConfig config = wide_model(with_experts);
    on_ranks([&](Communicator& comm) {
      const SentBytes counted{config, comm.size(), DType::f32};
      const Wire eight = Wire::parse("int8"), two = Wire::parse("int2");
      for (const CodecSite& site : codec_sites(config)) {
        const double measured = double(step_of(comm, config, at(site, "int8")).bytes) -
                                double(step_of(comm, config, at(site, "int2")).bytes);
        const double expected =
            32 * comm.size() * (counted.of(site, eight) - counted.of(site, two));
        EXPECT_EQ(measured, expected) << site.name << ", " << comm.size() << " ranks";
      }
    });
  }
}

TEST(CodecSites, RanksWithDifferentCodecsAreNamed) {
  for (const char* site : {"experts=int4", "embeddings=int4"}) {
    on_ranks([&](Communicator& comm) {
      const CodecPolicy codec = CodecPolicy::parse(comm.rank() == 0 ? "none" : site);
      EXPECT_THROW(step_of(comm, wide_model(true), codec), Mismatch) << site;
    });
  }
}

}  // namespace
}  // namespace tandem
