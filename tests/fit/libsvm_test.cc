#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "fit/problem/dataset.h"
#include "tandem/error.h"

namespace tandem::fit {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

class LibsvmTest : public testing::Test {
 protected:
  Dataset read(const std::string& text) {
    std::ofstream(path_, std::ios::binary) << text;
    return read_libsvm(path_);
  }
  std::string refusal(const std::string& text) {
    try {
      read(text);
    } catch (const IoError& error) {
      return error.what();
    }
    return "no error";
  }
  void TearDown() override { std::filesystem::remove(path_); }

  const std::string path_ = testing::TempDir() + "tandem_libsvm_" +
                            testing::UnitTest::GetInstance()->current_test_info()->name() + ".svm";
};

TEST_F(LibsvmTest, ReadsRowsCommentsAndBlankLines) {
  const Dataset data = read("+1 1:0.5 3:-2e-1 # a row\n\n# none\r\n-1\n2.5\t2:7 \r\n0 3:1");
  EXPECT_EQ(data.features, 3);
  EXPECT_THAT(data.labels, ElementsAre(1, -1, 2.5, 0));
  EXPECT_THAT(data.offsets, ElementsAre(0, 2, 2, 3, 4));
  EXPECT_THAT(data.columns, ElementsAre(0, 2, 1, 2));
  EXPECT_THAT(data.values, ElementsAre(0.5, -0.2, 7, 1));
}

TEST_F(LibsvmTest, BadTextIsNamedWithFileLineAndToken) {
  const struct {
    const char *text, *expected;
  } cases[] = {
      {"1 1:2\nspam 1:2\n", ":2: \"spam\": expected a finite number as a label"},
      {"1 1:2\n1 2\n", ":2: \"2\": expected index:value"},
      {"1 0:2\n", ":1: \"0:2\": expected an index of 1 to"},
      {"1 -3:2\n", ":1: \"-3:2\": expected an index of 1 to"},
      {"1 99999999999:2\n", "expected an index of 1 to"},
      {"1 1:2\n-1 2147483647:1\n", ":2: \"2147483647:1\": expected an index of 1 to 16777216"},
      {"1 16777217:1\n", ":1: \"16777217:1\": expected an index of 1 to 16777216"},
      {"1 3:1 3:2\n", ":1: \"3:2\": expected an index above 3"},
      {"1 3:1 2:2\n", ":1: \"2:2\": expected an index above 3"},
      {"1 3:nan\n", ":1: \"3:nan\": expected a finite number as a value"},
      {"1 3:inf\n", "expected a finite number as a value"},
      {"1 3:1e999\n", "expected a finite number as a value"},
      {"1 3:\n", "expected a finite number as a value"},
      {"1 3:4x\n", "expected a finite number as a value"},
      {"nan 3:4\n", "expected a finite number as a label"},
      {"", ": no rows: expected LIBSVM lines"},
      {"# nothing\n\n", ": no rows: expected LIBSVM lines"},
      {"1\n-1\n", ": no index:value pair in any row"},
      {"{\"json\": true}\n", ":1: \"{\"json\":\": expected a finite number as a label"},
  };
  for (const auto& each : cases) {
    SCOPED_TRACE(each.text);
    const std::string said = refusal(each.text);
    EXPECT_THAT(said, HasSubstr(each.expected));
    EXPECT_THAT(said, HasSubstr(path_));
    EXPECT_EQ(said.find('\n'), said.npos);
  }
}

TEST_F(LibsvmTest, LongTokensAreCut) {
  EXPECT_LT(refusal(std::string(100000, 'x') + " 1:2\n").size(), 300u);
}

TEST_F(LibsvmTest, TwoLabelsBecomeClasses) {
  Dataset data = read("3 1:1\n7 1:2\n3 1:3\n");
  const Classes classes = find_classes(data, path_);
  make_classes(data, classes, path_);
  EXPECT_THAT(data.labels, ElementsAre(-1, 1, -1));
  Dataset held_out = read("7 1:1\n7 2:1\n");  // one of the classes
  make_classes(held_out, classes, path_);
  EXPECT_THAT(held_out.labels, ElementsAre(1, 1));
  Dataset other = read("3 1:1\n5 2:1\n");
  EXPECT_THROW(make_classes(other, classes, path_), InvalidArgument);
}

TEST_F(LibsvmTest, OtherNumbersOfLabelsAreRefused) {
  for (const char* text : {"1 1:1\n1 1:2\n", "1 1:1\n2 1:2\n3 1:1\n"}) {
    EXPECT_THROW(find_classes(read(text), path_), InvalidArgument) << text;
  }
}

TEST_F(LibsvmTest, AccuracyCountsTheRightSide) {
  const Dataset data = read("1 1:1\n-1 1:1\n-1 2:1 3:9\n1 2:-2\n1 3:1\n");
  EXPECT_DOUBLE_EQ(accuracy(data, std::vector<double>{1, -1}), 0.6);  // 0 is no side
}

TEST_F(LibsvmTest, ShuffleMovesRowsWhole) {
  Dataset data = read("1 1:1\n2 1:2 2:2\n3 3:3\n4\n5 1:5 2:5 3:5\n"), before = data;
  shuffle_rows(data, 5);
  EXPECT_NE(data.labels, before.labels);
  EXPECT_THAT(data.labels, testing::UnorderedElementsAreArray(before.labels));
  for (size_t row = 0; row < data.labels.size(); ++row) {
    const size_t from = size_t(data.labels[row]) - 1;
    EXPECT_EQ(data.offsets[row + 1] - data.offsets[row],
              before.offsets[from + 1] - before.offsets[from]);
    for (int64_t k = data.offsets[row]; k < data.offsets[row + 1]; ++k)
      EXPECT_EQ(data.values[size_t(k)], data.labels[row]);
  }
}

}  // namespace
}  // namespace tandem::fit
