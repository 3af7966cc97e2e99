#include "core/system/output.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "core/system/file_descriptor.h"
#include "core/system/files.h"

namespace tandem {

void write_output(const std::string& path, std::string_view text) {
  const FileDescriptor file(path, O_WRONLY | O_CREAT | O_TRUNC | O_NOCTTY);
  while (!text.empty()) {
    const ssize_t put = ::write(file.get(), text.data(), text.size());
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) throw_errno(path, "cannot write");
    text.remove_prefix(size_t(put));
  }
}

}  // namespace tandem
