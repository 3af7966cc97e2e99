#include "core/system/lines.h"

#include <gtest/gtest.h>

#include <random>

namespace tandem {
namespace {

/// Lines of std::getline, and whether each is cut.
std::pair<std::vector<std::string>, std::vector<bool>> read_lines(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> lines;
  std::vector<bool> are_cut;
  for (std::string line; std::getline(stream, line);) {
    lines.push_back(line);
    are_cut.push_back(stream.eof());
  }
  return {lines, are_cut};
}

TEST(Lines, AreThoseOfGetline) {
  std::mt19937 random(1);
  for (int i = 0; i < 2000; ++i) {
    std::string text(random() % 12, ' ');
    for (char& c : text) c = "a\n\r \0"[random() % 5];
    std::vector<std::string> lines;
    std::vector<bool> are_cut;
    const Lines all(text);
    for (const std::string_view line : all) {
      lines.emplace_back(line);
      are_cut.push_back(all.is_cut(line));
    }
    EXPECT_EQ(std::pair(lines, are_cut), read_lines(text)) << text;
  }
}

TEST(Words, AreThoseOfAStream) {
  std::mt19937 random(2);
  for (int i = 0; i < 2000; ++i) {
    std::string text(random() % 12, ' ');
    for (char& c : text) c = "ab\n\r \t\v\f"[random() % 8];
    std::istringstream stream(text);
    std::vector<std::string> words;
    for (std::string word; stream >> word;) words.push_back(word);
    EXPECT_EQ(words_of(text), words) << text;
  }
}

/// Prints until memory is short.
struct Failing {
  friend std::ostream& operator<<(std::ostream& stream, const Failing&) {
    stream << "half";
    throw std::bad_alloc();
  }
};
struct FailingInside {
  friend std::ostream& operator<<(std::ostream& stream, const FailingInside&) {
    // The standard library only notes that the stream's own buffer cannot grow.
    stream.setstate(std::ios_base::badbit);
    return stream;
  }
};

TEST(Printed, IsTheWholeTextOrAnError) {
  EXPECT_EQ(printed(12), "12");
  EXPECT_THROW(printed(Failing()), std::bad_alloc);
  EXPECT_THROW(printed(FailingInside()), std::ios_base::failure);
}

}  // namespace
}  // namespace tandem
