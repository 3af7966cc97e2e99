#include "engine/report/progress.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>

namespace tandem {
namespace {

std::string printed(bool terminal, const std::function<void(ProgressLine&)>& body) {
  char* text = nullptr;
  size_t bytes = 0;
  std::FILE* out = open_memstream(&text, &bytes);
  {
    ProgressLine line(out, terminal);
    body(line);
  }
  std::fclose(out);
  std::string result(text, bytes);
  std::free(text);
  return result;
}

TEST(Progress, DescribesStepsLossRateAndEta) {
  EXPECT_EQ(describe({120, 2000, 2.34561, 12345}, 83),
            "step  120/2000   6.0%  loss 2.3456  12.3k tok/s  ETA 1:23");
  EXPECT_EQ(describe({1, 10, std::nan(""), 0}, -1), "step  1/10  10.0%  ETA --:--");
  EXPECT_EQ(describe({.step = 5, .steps = 10, .loss = std::nan(""), .unit = "byte"}, 2),
            "byte  5/10  50.0%  ETA 0:02");
}

TEST(Progress, DescribesTraining) {
  EXPECT_EQ(describe({.step = 120,
                      .steps = 2000,
                      .loss = 2.34561,
                      .tokens_per_s = 12345,
                      .lr = 1.23e-3,
                      .grad_norm = 0.517,
                      .mfu = 0.414},
                     83),
            "step  120/2000   6.0%  loss 2.3456  12.3k tok/s  ETA 1:23  lr 1.2e-03  grad 0.52  "
            "MFU 41%");
}

TEST(Progress, FullLogDeviceIsNoError) {
  std::FILE* full = std::fopen("/dev/full", "w");
  ASSERT_NE(full, nullptr);
  {
    ProgressLine line(full, true);
    line.update({1, 2, 1.0, 10});
    line.note("a note");
  }
  std::fclose(full);
}

TEST(Progress, RunLimitedBySecondsHasASteadyTotal) {
  RunProgress progress{
      .step = 99, .loss = 2.5, .tokens_per_s = 18900, .elapsed_s = 7, .seconds = 110};
  EXPECT_EQ(describe(progress, 103),
            "step 99  0:07/1:50   6.4%  loss 2.5000  18.9k tok/s  ETA 1:43");
  progress.step = 4807;
  progress.elapsed_s = 110.02;
  EXPECT_EQ(describe(progress, 0),
            "step 4807  1:50/1:50 100.0%  loss 2.5000  18.9k tok/s  ETA 0:00");
}

TEST(Progress, BytesHaveUnits) {
  EXPECT_EQ(format_bytes(12), "12 bytes");
  EXPECT_EQ(format_bytes(32607), "32.6 kB");
  EXPECT_EQ(format_bytes(4.56e6), "4.6 MB");
  EXPECT_EQ(format_bytes(7.21e9), "7.2 GB");
}

TEST(Progress, DurationsAreMinutesAndSeconds) {
  EXPECT_EQ(format_duration(0), "0:00");
  EXPECT_EQ(format_duration(59.6), "1:00");
  EXPECT_EQ(format_duration(3723), "1:02:03");
  EXPECT_EQ(format_duration(HUGE_VAL), "--:--");
}

TEST(Progress, NonTerminalOutputHasFirstAndLastWithoutControlCharacters) {
  const std::string text = printed(false, [](ProgressLine& line) {
    for (int step = 1; step <= 100; ++step) line.update({step, 100, 1.0, 10});
    line.note("saved");
  });
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 3);
  EXPECT_NE(text.find("step   1/100"), std::string::npos);
  EXPECT_NE(text.find("step 100/100"), std::string::npos);
  EXPECT_EQ(text.find('\r'), std::string::npos);
  EXPECT_EQ(text.find('\x1b'), std::string::npos);
}

TEST(Progress, TerminalRedrawsOneLine) {
  const std::string text = printed(true, [](ProgressLine& line) {
    for (int step = 1; step <= 100; ++step) line.update({step, 100, 1.0, 10});
  });
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1);
  EXPECT_EQ(text.back(), '\n');
  EXPECT_NE(text.find("\rstep 100/100"), std::string::npos);
}

TEST(Progress, InterimMessageReplacesTheLine) {
  const auto body = [](ProgressLine& line) {
    line.meanwhile("validating 1 of 9");
    line.meanwhile("validating 2 of 9");  // too soon
    line.note("validated");
    line.update({1, 2, 1.0, 10});
  };
  EXPECT_THAT(printed(true, body),
              testing::StartsWith("\rvalidating 1 of 9\x1b[K\r\x1b[Kvalidated\n"));
  EXPECT_THAT(printed(false, body), testing::StartsWith("validating 1 of 9\nvalidated\nstep 1/2"));
}

TEST(Progress, PrintsNothingWithoutUpdates) {
  EXPECT_EQ(printed(true, [](ProgressLine&) {}), "");
}

}  // namespace
}  // namespace tandem
