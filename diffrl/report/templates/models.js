// Numbers fall at the first click (or Enter); sets without a value stay at the end.
document.querySelectorAll('.models thead th').forEach((head, column) => {
  head.tabIndex = 0;
  head.onkeydown = event => event.key === 'Enter' && head.click();
  head.addEventListener('click', () => {
    const body = head.closest('table').tBodies[0], down = head.getAttribute('aria-sort') !== 'descending';
    head.parentNode.querySelectorAll('th').forEach(one => one.removeAttribute('aria-sort'));
    head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
    const key = row => row.cells[column].dataset.value ?? '';
    [...body.rows].sort((a, b) => {
      const x = key(a), y = key(b);
      if (x === '' || y === '') return (x === '') - (y === '');
      const order = isNaN(x) || isNaN(y) ? y.localeCompare(x) : y - x;
      return down ? order : -order;
    }).forEach(row => body.appendChild(row));
  });
});
