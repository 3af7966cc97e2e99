// A new directory, removed at destruction.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

namespace tandem {

class TempDir {
 public:
  TempDir() {
    std::string form = (std::filesystem::temp_directory_path() / "tandem-test-XXXXXX").string();
    if (!::mkdtemp(form.data())) throw std::runtime_error("mkdtemp failed");
    path_ = form;
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

/// Writes without the fsync of write_file, as tests write many files.
inline void write_bytes(const std::string& path, std::string_view text) {
  std::ofstream(path, std::ios::binary) << text;
}

}  // namespace tandem
