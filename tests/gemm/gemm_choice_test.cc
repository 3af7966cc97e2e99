#include "gemm/gemm_choice.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace tandem::test {
namespace {

GemmChoice choice(uint64_t seed) {
  GemmChoice made;
  for (uint64_t& word : made.algorithm) word = seed *= 0x9e3779b97f4a7c15u;
  made.workspace = seed % 1000;
  return made;
}

TEST(GemmChoiceTest, TextRoundTrips) {
  for (const uint64_t seed : {0u, 1u, 77u}) {
    const auto read = gemm_choice_in(text_of(choice(seed)));
    ASSERT_TRUE(read);
    EXPECT_EQ(*read, choice(seed));
  }
  const GemmChoices all{{"cublaslt 1 | GPU | m 1", choice(3)},
                        {"cublaslt 1 | GPU | m 2", choice(4)}};
  EXPECT_EQ(gemm_choices_in(text_of(all)), all);
}

TEST(GemmChoiceTest, InvalidChoicesAreSkipped) {
  const std::string good = text_of(choice(5));
  for (const std::string& bad : {std::string(), good + " 1", good + "x", good.substr(0, 20),
                                 "z" + good, good + "\t", std::string("1 2 3")}) {
    EXPECT_FALSE(gemm_choice_in(bad)) << bad;
  }
  EXPECT_EQ(gemm_choices_in("no tab\nkey\t" + good + "\nother\t1 2\n\n"),
            (GemmChoices{{"key", choice(5)}}));
  EXPECT_EQ(gemm_choices_in("cut\t" + good), (GemmChoices{{"cut", choice(5)}}));
}

TEST(GemmChoiceTest, LowestRankWithAChoiceDecides) {
  const std::vector<GemmChoices> ranks{{{"a", choice(1)}},
                                       {{"a", choice(2)}, {"b", choice(3)}},
                                       {{"b", choice(4)}, {"c", choice(5)}}};
  EXPECT_EQ(agreed_choices(ranks),
            (GemmChoices{{"a", choice(1)}, {"b", choice(3)}, {"c", choice(5)}}));
}

}  // namespace
}  // namespace tandem::test
