#include "engine/plan/codecs/codec_search.h"

#include <gmock/gmock.h>

#include <cmath>
#include <map>

#include "tandem/error.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;

ModelConfig model() {
  ModelConfig config;
  config.hidden = 1024;
  config.layers = 4;
  return config;
}
const std::vector<Wire> kFormats{Wire::parse("lossless"), Wire::parse("int8"), Wire::parse("int4"),
                                 Wire::parse("int2")};

/// A loss of 2 bits that rises by `rises` at the attention, by half of that at the MLP, by `extra`
/// more if both have a format, and by 100 % for any lossy format elsewhere.
struct Loss {
  std::map<std::string, double> rises{
      {"none", 0}, {"lossless", 0}, {"int8", -1e-4}, {"int4", 0.004}, {"int2", 0.2}};
  double extra = 0;
  int calls = 0;
  double operator()(const CodecPolicy& policy) {
    ++calls;
    const double attention = rises.at(policy.attention.describe()),
                 mlp = rises.at(policy.mlp.describe()) / 2;
    const bool elsewhere = !policy.embeddings.is_exact() || !policy.experts.is_exact();
    return 2 * (1 + attention + mlp + (attention > 0 && mlp > 0 ? extra : 0) + elsewhere);
  }
};

CodecChoice search(Loss& loss, double budget, const ModelConfig& config = model()) {
  return search_codecs({config, 2, DType::bf16}, kFormats, budget,
                       [&](const CodecPolicy& policy) { return loss(policy); });
}

TEST(CodecSearch, ChoosesTheCheapestWithinTheBudget) {
  const std::pair<double, std::string> expected[] = {
      {0, "attention=lossless,mlp=lossless"}, {1e-3, "attention=int8,mlp=int8"},
      {2.5e-3, "attention=int8,mlp=int4"},    {0.01, "attention=int4,mlp=int4"},
      {0.12, "attention=int4,mlp=int2"},      {0.5, "attention=int2,mlp=int2"}};
  for (const auto& [budget, policy] : expected) {
    Loss loss;
    const CodecChoice choice = search(loss, budget);
    EXPECT_EQ(choice.best().policy.describe(), policy + ",embeddings=lossless") << budget;
    EXPECT_LE(choice.best().rise, budget);
    EXPECT_NEAR(choice.best().rise, loss(choice.best().policy) / 2 - 1, 1e-12);
    EXPECT_EQ(choice.uncompressed().policy, CodecPolicy{});
    EXPECT_EQ(choice.uncompressed().rise, 0);
    EXPECT_LT(choice.best().bytes, choice.uncompressed().bytes);
  }
}

TEST(CodecSearch, ZeroBudgetMeasuresOnlyLosslessCodecs) {
  Loss loss;
  for (const CodecTrial& trial : search(loss, 0).trials) {
    EXPECT_TRUE(trial.policy.attention.is_exact() && trial.policy.mlp.is_exact() &&
                trial.policy.embeddings.is_exact());
  }
}

// The combined rise exceeds the sum: the chosen combination is measured, not predicted.
TEST(CodecSearch, BacksOffUntilTheCombinationHolds) {
  for (const double extra : {1e-4, 0.003, 0.03, 10.0}) {
    for (const double budget : {1e-3, 2.5e-3, 0.0061, 0.12, 0.5}) {
      Loss loss{.extra = extra};
      const CodecChoice choice = search(loss, budget);
      EXPECT_LE(choice.best().rise, budget) << extra;
      EXPECT_LE(loss(choice.best().policy) / 2 - 1, budget) << extra;
      EXPECT_LT(choice.best().bytes, choice.uncompressed().bytes);
      EXPECT_LT(loss.calls, 60);
    }
  }
  Loss loss{.extra = 10};
  EXPECT_EQ(search(loss, 0.01).best().policy.describe(),
            "attention=int8,mlp=int4,embeddings=lossless");
}

TEST(CodecSearch, EndsIfOnlyTheCombinationRises) {
  Loss loss;
  for (auto& [name, rise] : loss.rises) rise = 0;
  const CodecChoice choice =
      search_codecs({model(), 2, DType::bf16}, kFormats, 0.01, [&](const CodecPolicy& policy) {
        const bool both = !policy.attention.is_exact() && !policy.mlp.is_exact();
        return both ? 3.0 : 2.0;
      });
  EXPECT_EQ(choice.best().policy, CodecPolicy{});
}

TEST(CodecSearch, OnlySitesThatSendAreSearched) {
  ModelConfig parallel = model(), experts = model(), shared = model();
  parallel.parallel_block = true;
  experts.experts = shared.experts = 4;
  experts.moe_layer_freq = 2;
  shared.shared_ffn = 64;
  const auto names = [](const ModelConfig& config) {
    std::string text;
    for (const CodecSite& site : codec_sites(config)) {
      text += site.name + " " + std::to_string(site.rows) + " ";
    }
    return text;
  };
  EXPECT_EQ(names(model()), "attention 4 mlp 4 embeddings 2 ");
  EXPECT_EQ(names(parallel), "block 4 embeddings 2 ");
  EXPECT_EQ(names(experts), "attention 4 mlp 2 experts 4 embeddings 2 ");
  EXPECT_EQ(names(shared), "attention 4 mlp 4 experts 8 embeddings 2 ");
  experts.moe_layer_freq = 1;
  EXPECT_EQ(names(experts), "attention 4 experts 8 embeddings 2 ");

  for (const ModelConfig& config : {model(), parallel, experts, shared}) {
    Loss loss;
    EXPECT_NO_THROW(search(loss, 0.01, config).best().policy.require_used(config, 2));
    EXPECT_NO_THROW(codec_at(config, site_names(config), kFormats[1]).require_used(config, 2));
  }
  // 4 layers with two sums each, and two rows at the ends, of which a rank of two sends half: 1024
  // codes and 8 scales of bf16.
  const SentBytes sent{model(), 2, DType::bf16};
  EXPECT_EQ(sent.of(codec_at(model(), site_names(model()), Wire::parse("int8"))), 5 * (1024 + 16));
  EXPECT_EQ(sent.of(CodecPolicy::parse("int8")), 2 * 1024 + 4 * (1024 + 16));
  EXPECT_EQ(sent.of(CodecPolicy::parse("mlp=int8")), 3 * 2 * 1024 + 2 * (1024 + 16));
}

TEST(CodecSearch, PercentagesAreFractions) {
  EXPECT_DOUBLE_EQ(parse_percentage("0.5%").value(), 0.005);
  EXPECT_EQ(parse_percentage("0%"), 0);
  EXPECT_EQ(parse_percentage("150%"), 1.5);
  for (const char* text :
       {"-0.5%", "0.5", "", "%", "x%", "nan%", "inf%", "1e999%", "0.5%%", " 0.5%", "0.5% "}) {
    EXPECT_FALSE(parse_percentage(text)) << text;
  }
}

TEST(CodecSearch, InvalidLossIsNamed) {
  for (const double bits : {0.0, double(NAN), double(INFINITY)}) {
    try {
      search_codecs({model(), 2, DType::bf16}, kFormats, 0.1,
                    [&](const CodecPolicy& policy) { return policy.is_none() ? 2 : bits; });
      FAIL() << bits;
    } catch (const InvalidArgument& error) {
      EXPECT_THAT(error.what(), HasSubstr("codec 'attention=lossless,mlp=none'"));
    }
  }
}

}  // namespace
}  // namespace tandem
