// Who may read the files of a capture: dsprof/permissions.py decides it, and `open` says it.
#pragma once

#include <sys/stat.h>

namespace dsprof {

inline mode_t& file_mode() {
  static mode_t mode = 0600;
  return mode;
}

// Gives back to a new file what the umask took away.
inline void give_mode(int fd) {
  struct stat status;
  if (fstat(fd, &status) == 0 && (status.st_mode & 07777) != file_mode()) (void)!fchmod(fd, file_mode());
}

}  // namespace dsprof
