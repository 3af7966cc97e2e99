#include "core/system/process/build_id.h"

#include <fmt/format.h>
#include <link.h>

#include <cstring>
#include <span>

#include "core/version.h"

namespace tandem {
namespace {

struct Search {
  uintptr_t code;  ///< address inside the file to find
  std::string id;
};

constexpr size_t padded(size_t bytes) {
  return (bytes + 3) / 4 * 4;
}

/// Build ID in the notes of a segment; empty if there is none.
std::string find_id(const char* notes, size_t bytes) {
  while (bytes >= sizeof(ElfW(Nhdr))) {
    ElfW(Nhdr) note;
    std::memcpy(&note, notes, sizeof note);
    const size_t name_at = sizeof note, id_at = name_at + padded(note.n_namesz),
                 whole = id_at + padded(note.n_descsz);
    if (whole > bytes) return "";
    if (note.n_type == NT_GNU_BUILD_ID && note.n_namesz == 4 &&
        std::memcmp(notes + name_at, "GNU", 4) == 0) {
      std::string text;
      for (size_t i = 0; i < note.n_descsz; ++i) {
        text += fmt::format("{:02x}", static_cast<unsigned char>(notes[id_at + i]));
      }
      return text;
    }
    notes += whole;
    bytes -= whole;
  }
  return "";
}

int look_at(dl_phdr_info* file, size_t, void* data) {
  auto& search = *static_cast<Search*>(data);
  bool has_code = false;
  std::string id;
  for (const auto& segment : std::span(file->dlpi_phdr, file->dlpi_phnum)) {
    const uintptr_t begin = file->dlpi_addr + segment.p_vaddr;
    if (segment.p_type == PT_LOAD) {
      has_code |= search.code >= begin && search.code < begin + segment.p_memsz;
    }
    if (segment.p_type == PT_NOTE && id.empty()) {
      id = find_id(reinterpret_cast<const char*>(begin), segment.p_memsz);
    }
  }
  if (has_code) search.id = id;
  return has_code ? 1 : 0;
}

}  // namespace

std::string build_text() {
  Search search{reinterpret_cast<uintptr_t>(&find_id), ""};
  dl_iterate_phdr(look_at, &search);
  return fmt::format("Tandem {}, build {}", kVersion,
                     search.id.empty() ? kCommit : search.id.substr(0, 20));
}

}  // namespace tandem
