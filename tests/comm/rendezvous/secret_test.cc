// Sources of a secret, and refusals by name. No error reveals the secret.
#include "comm/rendezvous/secret.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "tandem/error.h"

namespace tandem::test {
namespace {

using control::read_secret;

constexpr const char* kText = "correct horse battery";

class SecretFile : public testing::Test {
 protected:
  SecretFile() {
    std::string name = std::filesystem::temp_directory_path() / "secret_test.XXXXXX";
    directory_ = mkdtemp(name.data());
  }
  ~SecretFile() override { std::filesystem::remove_all(directory_); }

  std::string make(const std::string& text, mode_t mode) const {
    const std::string path = directory_ / "secret";
    std::filesystem::remove(path);
    std::ofstream(path) << text;
    chmod(path.c_str(), mode);
    return path;
  }
  std::string path(const char* name) const { return directory_ / name; }

 private:
  std::filesystem::path directory_;
};

std::string refusal(const std::string& text, const std::string& file) {
  try {
    read_secret(text, file);
  } catch (const Error& error) {
    return error.what();
  }
  return "taken";
}

TEST(Secret, SecretIsTheVariablesText) {
  const auto secret = read_secret(kText, "");
  EXPECT_EQ(secret.source, "TANDEM_SECRET");
  EXPECT_EQ(secret.key, read_secret(kText, "").key);
  EXPECT_NE(secret.key, read_secret("correct horse batterY", "").key);
  EXPECT_TRUE(read_secret("", "").source.empty());
}

TEST(Secret, TooShortOrTooLongIsRefusedWithoutRevealingIt) {
  EXPECT_EQ(refusal("swordfish", ""),
            "TANDEM_SECRET: a secret of 9 bytes: expected 16 to 4096 (openssl rand -hex 32 makes "
            "one)");
  EXPECT_EQ(refusal(std::string(15, 'x'), "").find("xxx"), std::string::npos);
  EXPECT_EQ(refusal(std::string(16, 'x'), ""), "taken");
  EXPECT_EQ(refusal(std::string(4096, 'x'), ""), "taken");
  EXPECT_NE(refusal(std::string(4097, 'x'), "").find("more than 4096 bytes"), std::string::npos);
}

TEST(Secret, BothVariablesTogetherAreRefused) {
  EXPECT_EQ(refusal(kText, "/nowhere"),
            "TANDEM_SECRET and TANDEM_SECRET_FILE: both are set: expected one");
}

TEST_F(SecretFile, GivesTheSameSecretAsTheVariable) {
  const std::string path = make(std::string(kText) + "\n", 0600);
  EXPECT_EQ(read_secret("", path).key, read_secret(kText, "").key);
  EXPECT_EQ(read_secret("", path).source, "TANDEM_SECRET_FILE=" + path);
  EXPECT_EQ(refusal("", make(kText, 0400)), "taken");
}

TEST_F(SecretFile, FileReadableByOthersIsRefused) {
  for (const mode_t mode : {0640, 0604, 0644, 0620, 0610, 0666, 0777}) {
    const std::string path = make(kText, mode), said = refusal("", path);
    EXPECT_EQ(said.find("TANDEM_SECRET_FILE=" + path + ": mode 0"), 0u) << said;
    EXPECT_NE(said.find("expected 0600"), std::string::npos) << said;
    EXPECT_EQ(said.find(kText), std::string::npos) << said;
  }
}

TEST_F(SecretFile, FileOfAnotherUserIsRefused) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can give a file away";
  const std::string path = make(kText, 0600);
  ASSERT_EQ(chown(path.c_str(), 65534, 65534), 0);
  EXPECT_NE(refusal("", path).find("belongs to user 65534: expected this user, 0"),
            std::string::npos);
}

TEST_F(SecretFile, OtherThanRegularFileIsRefusedAtOnce) {
  EXPECT_THROW(read_secret("", path("missing")), IoError);
  EXPECT_NE(refusal("", path("missing")).find("missing"), std::string::npos);
  ASSERT_EQ(mkfifo(path("fifo").c_str(), 0600), 0);
  EXPECT_NE(refusal("", path("fifo")).find("expected a plain file"), std::string::npos);
  EXPECT_NE(refusal("", path("")).find("expected a plain file"), std::string::npos);
  EXPECT_NE(refusal("", make("", 0600)).find("0 bytes"), std::string::npos);
  EXPECT_NE(refusal("", make(std::string(100000, 'x'), 0600)).find("more than 4096"),
            std::string::npos);
}

TEST(RandomDigest, DigestsAreUnique) {
  std::set<std::string> seen;
  for (int i = 0; i < 1000; ++i) seen.insert(control::hex_of(control::random_digest()));
  EXPECT_EQ(seen.size(), 1000u);
}

}  // namespace
}  // namespace tandem::test
