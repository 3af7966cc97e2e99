#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "fit/methods/method.h"
#include "tandem/error.h"

namespace tandem::fit {
namespace {

TEST(FailureTest, ParsesRanges) {
  const Failure open = Failure::parse("3@10"), closed = Failure::parse("0@2-5");
  EXPECT_EQ(open.client, 3);
  EXPECT_EQ(open.first, 10);
  EXPECT_GT(open.last, int64_t(1) << 60);
  EXPECT_EQ(closed.last, 5);
  const FitOptions options{.failures = {closed}};
  EXPECT_TRUE(options.is_alive(0, 1));
  EXPECT_FALSE(options.is_alive(0, 2));
  EXPECT_FALSE(options.is_alive(0, 5));
  EXPECT_TRUE(options.is_alive(0, 6));
  EXPECT_TRUE(options.is_alive(1, 3));
}

TEST(FailureTest, RefusesOtherText) {
  for (const char* text : {"", "3", "@3", "3@", "3@0", "-1@3", "3@5-4", "3@5-", "3@1.5", "x@1"})
    EXPECT_THROW(Failure::parse(text), InvalidArgument) << text;
}

TEST(L2Test, ParsesNumbersAndKappa) {
  EXPECT_EQ(L2::parse("0.25").value, 0.25);
  EXPECT_EQ(L2::parse("auto:kappa=400").kappa, 400);
  for (const char* text : {"", "-1", "nan", "inf", "auto", "auto:kappa=1", "auto:kappa=", "1x"})
    EXPECT_THROW(L2::parse(text), InvalidArgument) << text;
}

TEST(MethodsTest, OptionsThatNoMethodReadsAreRefused) {
  const auto check = [](std::vector<const char*> names, const FitOptions& options) {
    std::vector<const MethodRow*> rows;
    for (const char* name : names) rows.push_back(&find_method(name));
    check_options(rows, options);
  };
  EXPECT_NO_THROW(check({"gd", "scaffnew"}, {.p = 0.5}));
  EXPECT_THROW(check({"gd"}, {.p = 0.5}), InvalidArgument);
  EXPECT_THROW(check({"scaffnew"}, {.sparsity = 2}), InvalidArgument);
  EXPECT_THROW(check({"scaffnew"}, {.cohort = 4}), InvalidArgument);
  EXPECT_NO_THROW(check({"scaffnew", "tamuna"}, {.cohort = 4}));
  EXPECT_THROW(check({"scaffnew"}, {.l1 = 0.1}), InvalidArgument);
  EXPECT_NO_THROW(check({"gd"}, {.l1 = 0.1}));
  EXPECT_THROW(check({"tamuna"}, {.clients = 4, .failures = {{4, 1, 2}}}), InvalidArgument);
  EXPECT_THROW(check({"gd"}, {.failures = {{1, 1, 2}}}), InvalidArgument);
  EXPECT_THROW(find_method("gdd"), InvalidArgument);
}

}  // namespace
}  // namespace tandem::fit
